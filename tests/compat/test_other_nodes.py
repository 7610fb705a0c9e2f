"""A node of another version with a router of today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.compat.conftest import Processes, Token
from tokenizers import Tokenizer

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.stage.random_adapter import random_adapter
from ryzanstein.v1 import adapter_pb2
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.adapter_pb2_grpc import AdapterServiceStub
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

QUESTION = "Count from 1 to 60."
ANSWER: list[Token] = [(100 + index, f"{index} ") for index in range(1500)]


def chat(url: str, **more: Any) -> httpx.Response:
    """A complete answer."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def streamed(url: str, **more: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer."""
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "stream": True, **more}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def content(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


@pytest.mark.parametrize("version", ["earlier", "newer"])
def test_a_node_of_another_version_serves(processes: Processes, version: str) -> None:
    node, address = processes.node("other", ANSWER, 0.002, version)
    _, url = processes.router(address)
    hello = node.event("hello")["message"]
    # It tells any node how seldom this one may beat while it has no work. An earlier one goes on as it did.
    assert hello["unknown"] == (["hello.4"] if version == "earlier" else [])
    answer = chat(url, max_tokens=12).json()
    assert answer["choices"][0]["message"]["content"] == "".join(text for _, text in ANSWER[:12])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 7, "completion_tokens": 12}
    submit = node.event("submit")["message"]
    assert submit["unknown"] == []
    assert submit["messages"]["messages"][0] == {"role": "ROLE_USER", "content": QUESTION}
    assert "".join(map(content, streamed(url, max_tokens=30))) == "".join(text for _, text in ANSWER[:30])


def started_on(router: str, session_id: str, **sampling: Any) -> tuple[Any, inference.GenerationStarted, grpc.Channel]:
    """A streamed answer that has begun."""
    channel = grpc.insecure_channel(router, options=(("grpc.use_local_subchannel_pool", 1),))
    message = inference.Message(role=inference.ROLE_USER, content=QUESTION)
    params = inference.SamplingParams(temperature=0, **sampling)
    request = inference.ChatRequest(model="demo", messages=[message], session_id=session_id, sampling=params)
    stream = InferenceServiceStub(channel).StreamChat(inference.StreamChatRequest(chat=request), timeout=60)
    return stream, next(stream).event.started, channel


def rest(stream: Any) -> tuple[list[Token], list[str], list[int]]:
    """The tokens with the text of each delta, the nodes that generated them, and how the choice ended."""
    seen: list[Token] = []
    nodes, ends = [], []
    for event in (response.event for response in stream):
        if event.HasField("delta"):
            assert event.delta.first_index == len(seen), "a token was lost or repeated"
            texts = [event.delta.text] + [""] * (len(event.delta.token_ids) - 1)
            seen += zip(event.delta.token_ids, texts, strict=True)
            nodes.append(event.delta.node_id)
        elif event.HasField("finished"):
            ends.append(event.finished.finish_reason)
    return seen, list(dict.fromkeys(nodes)), ends


def one_by_one(tokens: list[Token]) -> list[Token]:
    """The tokens, each with its own text: a delta of several has the text of all."""
    tokenizer, ids = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), [token_id for token_id, _ in tokens]
    until = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    assert until[-1] == "".join(text for _, text in tokens)
    return [(token_id, after.removeprefix(before)) for token_id, before, after in zip(ids, until, until[1:], strict=False)]


@pytest.mark.long
def test_a_cancel_reaches_an_earlier_node(processes: Processes) -> None:
    node, address = processes.node("other", ANSWER, 0.02)
    router, _ = processes.router(address)
    stream, started, channel = started_on(router.grpc_address, "")
    with channel:
        handle = node.event("submit")["message"]["handle"]
        cancel = inference.CancelGenerationRequest(generation_id=started.generation_id)
        InferenceServiceStub(channel).CancelGeneration(cancel, timeout=10)
        assert rest(stream)[2] == [inference.FINISH_REASON_CANCELLED]
    assert node.event("cancel")["message"]["handle"] == handle


@pytest.mark.long
def test_what_a_dying_earlier_node_ran_goes_on_at_a_node_of_today(processes: Processes) -> None:
    today = processes.worker()
    alone, _ = processes.router(today.grpc_address)
    stream, _, channel = started_on(alone.grpc_address, "", seed=5)
    with channel:
        undisturbed, _, ends = rest(stream)
    alone.kill()
    assert len(undisturbed) > 40
    node, address = processes.node("other", one_by_one(undisturbed), 0.05)
    router, _ = processes.router(address, today.grpc_address)
    for session in range(32):  # until one session's node is the earlier one
        stream, started, channel = started_on(router.grpc_address, f"s-{session}", seed=5)
        with channel:
            if started.node_id == "other":
                node.event("submit")
                node.kill()
            seen = rest(stream)
        if started.node_id == "other":
            break
    assert started.node_id == "other"
    assert [token_id for token_id, _ in seen[0]] == [token_id for token_id, _ in undisturbed]
    assert "".join(text for _, text in seen[0]) == "".join(text for _, text in undisturbed)
    assert seen[1:] == (["other", "today"], ends)


@pytest.mark.lab
@pytest.mark.parametrize("version", ["earlier", "newer"])
def test_a_node_that_knows_no_adapters_is_never_asked_for_one(processes: Processes, version: str, tmp_path: Path) -> None:
    node, address = processes.node("other", ANSWER, 0.002, version)
    today = processes.worker()
    with grpc.insecure_channel(today.grpc_address) as channel:
        path = random_adapter(tmp_path / "tuned", MODEL_DIR, size=1.0)
        load = adapter_pb2.LoadAdapterRequest(name="tuned", path=str(path))
        AdapterServiceStub(channel).LoadAdapter(load, timeout=30)
    _, url = processes.router(address, today.grpc_address)
    node.event("hello")
    listed = {model["id"]: model for model in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]}
    assert listed["tuned"]["parent"] == "demo"
    texts = [chat(url, model="tuned", max_tokens=8, user=f"u-{number}") for number in range(12)]
    assert len({each.json()["choices"][0]["message"]["content"] for each in texts}) == 1
    assert texts[0].json()["choices"][0]["message"]["content"] != "".join(text for _, text in ANSWER[:8])
    today.kill()
    refused = chat(url, model="tuned", max_tokens=8)
    assert refused.status_code in (404, 501, 503)
    assert chat(url, max_tokens=1).json()["choices"][0]["message"]["content"] == ANSWER[0][1]
    submits = [line for line in node.until(lambda line: line["event"] == "submit") if line["event"] == "submit"]
    assert len(submits) == 1, "it was asked for the model alone, once"
    assert "adapter" not in submits[0]["message"]
