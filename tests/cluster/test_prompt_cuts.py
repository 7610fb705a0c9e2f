"""Prompts that do not fit, at every face, and on nodes that read sparsely: a node's death changes neither cut nor answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

CONTEXT = 2048
SYSTEM = {"role": "system", "content": "You are brief."}
CUPS = [f"tea cup number {n} is on the table." for n in range(150)]
TALK = [
    message
    for cup in CUPS
    for message in ({"role": "user", "content": f"Repeat: {cup}"}, {"role": "assistant", "content": cup})
]
LAST = {"role": "user", "content": "Count from 1 to 40."}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    flags = ("--sparse-attention", "window=64,sinks=16,layers=0-1")
    with LocalCluster(ClusterSpec(MODEL_DIR, tp=2, worker_flags=flags)) as running:
        yield running


@pytest.fixture(scope="module")
def http(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.http_url, timeout=60, trust_env=False) as client:
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    greedy = {} if path == "/tokenize" else {"temperature": 0}
    answer = http.post(path, json={"model": "demo", **greedy, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_of_token_ids_the_middle_is_left_out(http: httpx.Client) -> None:
    ids = post(http, "/tokenize", prompt="one two three four " * 800)["tokens"][: CONTEXT + 100]
    cut = post(http, "/v1/completions", prompt=ids, max_tokens=8, keep_prompt_head=10)
    assert cut["usage"]["prompt_tokens"] == CONTEXT - 8
    assert cut["usage"]["prompt_tokens_details"]["omitted_tokens"] == 108
    same = post(http, "/v1/completions", prompt=ids[:10] + ids[118:], max_tokens=8)
    assert same["choices"][0]["text"] == cut["choices"][0]["text"]
    assert "omitted_tokens" not in same["usage"]["prompt_tokens_details"]


def test_without_a_policy_it_is_refused(http: httpx.Client) -> None:
    body = {"model": "demo", "messages": [SYSTEM, *TALK, LAST], "max_tokens": 8}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_of_a_conversation_whole_turns_are_left_out_and_every_face_says_so(http: httpx.Client, cluster: LocalCluster) -> None:
    messages = [SYSTEM, *TALK, LAST]
    cut = post(http, "/v1/chat/completions", messages=messages, max_tokens=64, keep_prompt_head=0)
    omitted = cut["usage"]["prompt_tokens_details"]["omitted_tokens"]
    num_turns = next(n for n in range(150) if len(tokens(http, [SYSTEM, *TALK[2 * n :], LAST])) <= CONTEXT - 64)
    kept = [SYSTEM, *TALK[2 * num_turns :], LAST]
    assert cut["usage"]["prompt_tokens"] == len(tokens(http, kept))
    assert omitted == len(tokens(http, messages)) - cut["usage"]["prompt_tokens"]
    answer = cut["choices"][0]["message"]["content"]
    assert answer == post(http, "/v1/chat/completions", messages=kept, max_tokens=64)["choices"][0]["message"]["content"]
    shape = {"input": messages, "max_output_tokens": 64, "store": False}
    response = post(http, "/v1/responses", **shape, truncation="auto")
    assert (response["usage"]["input_tokens_details"]["omitted_tokens"], response["truncation"]) == (omitted, "auto")
    assert http.post("/v1/responses", json={"model": "demo", **shape}).status_code == 400
    roles = {"system": inference.ROLE_SYSTEM, "user": inference.ROLE_USER, "assistant": inference.ROLE_ASSISTANT}
    sampling = inference.SamplingParams(temperature=0, max_tokens=64, keep_prompt_head=0)
    given = [inference.Message(role=roles[each["role"]], content=each["content"]) for each in messages]
    with grpc.insecure_channel(cluster.router_address) as channel:
        found = InferenceServiceStub(channel).Chat(inference.ChatRequest(messages=given, sampling=sampling), timeout=60)
    assert found.usage.omitted_prompt_tokens == omitted


def tokens(http: httpx.Client, messages: list[dict[str, str]]) -> list[int]:
    found: list[int] = post(http, "/tokenize", messages=messages)["tokens"]
    return found


def test_a_dead_node_changes_neither_the_cut_nor_the_answer(http: httpx.Client, cluster: LocalCluster) -> None:
    fields = {"messages": [SYSTEM, *TALK, LAST], "max_tokens": 100, "keep_prompt_head": 0, "ignore_eos": True}
    whole = post(http, "/v1/chat/completions", **fields)
    texts: list[str] = []
    body = {"model": "demo", "temperature": 0, "stream": True, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        node = response.headers["x-ryzanstein-node"]
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert chunk["prompt_tokens_details"] == {
                    "omitted_tokens": whole["usage"]["prompt_tokens_details"]["omitted_tokens"]
                }
                texts.append(chunk["choices"][0]["delta"].get("content") or "")
                if len(texts) == 12:
                    cluster.kill(node)
    assert len(texts) > 12
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
