"""The HTTP face over a real cluster: what needs a node to be true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

QUESTION = {"role": "user", "content": "Count from 1 to 40."}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, num_routers=2, tp=1)) as running:
        yield running


@pytest.fixture(scope="module")
def http(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.http_url, timeout=60, trust_env=False) as client:
        yield client


def completed(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"model": "demo", "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chatted(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "temperature": 0, "messages": [QUESTION], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens_of(http: httpx.Client, **fields: Any) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"model": "demo", **fields}).json()["tokens"]
    return ids


def test_a_prompt_is_scored_as_it_was_generated(http: httpx.Client) -> None:
    """Decoded one by one or fed at once, in chunks: each token has the same log probability."""
    prompt = tokens_of(http, messages=[QUESTION]) * 8
    message = completed(http, prompt=prompt, max_tokens=150, logprobs=2, ignore_eos=True)["choices"][0]["logprobs"]
    texts = http.post("/tokenize", json={"prompt": "".join(message["tokens"]), "add_special_tokens": False}).json()
    whole = [*prompt, *texts["tokens"]]
    for _ in range(2):  # the second time its blocks are cached
        (choice,) = completed(http, prompt=[whole], echo=True, logprobs=2, max_tokens=0)["choices"]
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(whole)
        assert scores["token_logprobs"][0] is None
        assert scores["token_logprobs"][len(prompt) :] == pytest.approx(message["token_logprobs"], abs=1e-3)
        assert [set(top) for top in scores["top_logprobs"][len(prompt) :]] == [set(top) for top in message["top_logprobs"]]


def test_bad_words_and_allowed_tokens_shape_the_answer(http: httpx.Client) -> None:
    plain = chatted(http, max_tokens=24)["choices"][0]["message"]["content"]
    word = plain.split()[3]
    without = chatted(http, max_tokens=24, bad_words=[word])["choices"][0]["message"]["content"]
    assert word in plain.split()
    assert word not in without.split()
    allowed = tokens_of(http, prompt="7", add_special_tokens=False)
    only = chatted(http, max_tokens=5, allowed_token_ids=allowed, temperature=1)["choices"][0]["message"]["content"]
    assert set(only.replace(" ", "")) == {"7"}


def test_the_text_has_what_was_asked_for(http: httpx.Client) -> None:
    plain = chatted(http, max_tokens=40, stop=["5"])["choices"][0]["message"]["content"]
    with_stop = chatted(http, max_tokens=40, stop=["5"], include_stop_str_in_output=True)["choices"][0]["message"]["content"]
    assert with_stop == plain + "5"
    ask = {"messages": [{"role": "user", "content": "Count from 1 to 3."}], "max_tokens": 64}
    bare = chatted(http, **ask)["choices"][0]
    assert bare["finish_reason"] == "stop"
    spelled = chatted(http, **ask, skip_special_tokens=False)["choices"][0]["message"]["content"]
    ended = chatted(http, **ask, skip_special_tokens=False, include_stop_str_in_output=True)["choices"][0]["message"]["content"]
    assert spelled == bare["message"]["content"]
    assert ended.startswith(spelled)
    assert len(ended) > len(spelled)


def test_a_prompt_is_truncated_from_its_beginning(http: httpx.Client) -> None:
    ids = tokens_of(http, prompt="one two three four five six seven", add_special_tokens=False)
    whole = completed(http, prompt=ids[-4:], max_tokens=8)
    cut = completed(http, prompt=ids, max_tokens=8, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]


def test_the_last_message_is_continued(http: httpx.Client) -> None:
    begun = "1 2 3 4 5"
    messages = [QUESTION, {"role": "assistant", "content": begun}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    text = http.post("/detokenize", json={"tokens": tokens_of(http, **fields)}).json()["prompt"]
    assert text.endswith(begun)
    answer = chatted(http, **fields, max_tokens=8)["choices"][0]["message"]["content"]
    assert answer.split()[0] in ("6", ",", "6,")


def test_an_effort_that_the_template_lacks_has_no_effect(http: httpx.Client) -> None:
    answer, other = (chatted(http, messages=[QUESTION], max_tokens=8, **more) for more in ({}, {"reasoning_effort": "high"}))
    assert answer["choices"] == other["choices"]


def test_too_long_a_prompt_is_refused_in_known_words(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    body = {"model": "demo", "messages": [QUESTION], "max_tokens": model["max_model_len"]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"].startswith(f"This model's maximum context length is {model['max_model_len']} tokens. However, ")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_parameters_survive_the_node(http: httpx.Client, cluster: LocalCluster) -> None:
    """Bad words, allowed tokens and the text are functions of the generated tokens, wherever they were generated."""
    plain = chatted(http, max_tokens=60)["choices"][0]["message"]["content"]
    fields = {"bad_words": [plain.split()[20]], "logprobs": True, "skip_special_tokens": False, "max_tokens": 60}
    undisturbed = chatted(http, **fields)["choices"][0]
    body = {"model": "demo", "temperature": 0, "messages": [QUESTION], "stream": True, **fields}
    texts, rows, killed = [], [], False
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        node = response.headers["x-ryzanstein-node"]
        assert node in cluster.node_ids
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts.append(choice["delta"].get("content") or "")
            rows += (choice["logprobs"] or {}).get("content", [])
            if len(rows) > 8 and not killed:
                cluster.kill(node)
                killed = True
    assert "".join(texts) == undisturbed["message"]["content"]
    assert [row["token"] for row in rows] == [row["token"] for row in undisturbed["logprobs"]["content"]]
    cluster.restart(node)
    cluster.wait_nodes(2)


def test_a_stream_goes_on_at_another_router_as_it_was(cluster: LocalCluster, http: httpx.Client) -> None:
    """The router dies in the middle: same id, creation time, options and usage, and each token once."""
    options = {"stream": True, "stream_options": {"include_usage": True}, "bad_words": ["30"]}
    body = {"model": "demo", "temperature": 0, "messages": [QUESTION], "max_tokens": 90, "ignore_eos": True, **options}
    whole = chatted(http, **{**body, "stream": False, "stream_options": None})
    dying, other = cluster.router_names
    chunks: list[dict[str, Any]] = []
    last = ""
    with httpx.stream("POST", f"{cluster.http_url_of(dying)}/v1/chat/completions", json=body, trust_env=False) as stream:
        for line in stream.iter_lines():
            last = line.removeprefix("id: ") if line.startswith("id: ") else last
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == 12:
                break
    cluster.kill(dying)
    again = {**body, "stream_options": None}
    url = f"{cluster.http_url_of(other)}/v1/chat/completions"
    rest = httpx.post(url, json=again, headers={"Last-Event-ID": last}, timeout=60, trust_env=False)
    assert rest.status_code == 200, rest.text
    lines = rest.text.splitlines()
    chunks += [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == 90
    past = f"{last.split(':')[0]}:0:9999"
    for method, where in (("POST", "/v1/chat/completions"), ("GET", f"/v1/generations/{last.split(':')[0]}/events")):
        answer = httpx.request(
            method,
            cluster.http_url_of(other) + where,
            json=body if method == "POST" else None,
            headers={"Last-Event-ID": past},
            trust_env=False,
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    cluster.restart(dying)


def test_scores_go_over_grpc_and_to_readers_at_another_router(cluster: LocalCluster) -> None:
    """Whole, streamed, relayed by the other router and replayed: the same tokens with the same scores."""
    params = inference.SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1, ignore_eos=True)
    asked = inference.CompleteRequest(text="Count from 1 to 40. " * 12, sampling=params)
    here, there = (cluster.services[name].grpc_address for name in cluster.router_names)
    with grpc.insecure_channel(here) as channel, grpc.insecure_channel(there) as other:
        whole = InferenceServiceStub(channel).Complete(asked, timeout=30)
        assert [token.HasField("logprob") for token in whole.prompt] == [False] + [True] * (whole.usage.prompt_tokens - 1)
        assert all(len(token.top) == 1 for token in whole.prompt[1:])
        events = [
            response.event
            for response in InferenceServiceStub(channel).StreamComplete(
                inference.StreamCompleteRequest(complete=asked), timeout=30
            )
        ]
        attach = inference.AttachGenerationRequest(generation_id=events[0].started.generation_id)
        relayed = [response.event for response in InferenceServiceStub(other).AttachGeneration(attach, timeout=30)]
    for seen in (events, relayed):
        kinds = [event.WhichOneof("kind") for event in seen]
        assert kinds[0] == "started"
        assert kinds.index("delta") > max(i for i, kind in enumerate(kinds) if kind == "prompt"), "before the first token"
        tokens = [token for event in seen for token in event.prompt.tokens]
        assert [token.token_id for token in tokens] == [token.token_id for token in whole.prompt]
        assert [token.logprob for token in tokens] == pytest.approx([token.logprob for token in whole.prompt], abs=1e-4)
        assert seen[0].started.created == events[0].started.created > 1_700_000_000


def test_the_official_client_calls_functions(cluster: LocalCluster) -> None:
    """Streamed or not: the same items with the same ids; the result of a call goes back by its id."""
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    asked: dict[str, Any] = {
        "model": "demo",
        "input": "What is the weather?",
        "tools": [{"type": "function", "name": "weather", "parameters": schema, "strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(**asked)
        (call,) = (item for item in answer.output if item.type == "function_call")
        assert (answer.status, call.name) == ("completed", "weather")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        events: list[Any] = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        (streamed,) = (item for item in events[-1].response.output if item.type == "function_call")
        added = [event.item.id for event in events if event.type == "response.output_item.added"]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert streamed.id in added
        assert {event.item_id for event in deltas} == {streamed.id}
        assert "".join(event.delta for event in deltas) == streamed.arguments == call.arguments
        assert client.responses.retrieve(events[-1].response.id).output == events[-1].response.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        after = client.responses.create(
            **{**asked, "input": [result], "tool_choice": "none", "max_output_tokens": 8}, previous_response_id=answer.id
        )
        assert all(item.type == "message" for item in after.output)


def test_the_official_client_holds_a_conversation_of_responses(cluster: LocalCluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="demo", input="My name is Tavik.", temperature=0)
        stream = client.responses.create(
            model="demo", input="What is my name?", previous_response_id=first.id, temperature=0, stream=True
        )
        events: list[Any] = list(stream)
        last = events[-1].response
        assert "Tavik" in last.output_text
        assert client.responses.retrieve(last.id).output_text == last.output_text
        client.responses.delete(last.id)
