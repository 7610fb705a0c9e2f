"""Each bad input gets the status and details of docs/reference/errors.md; the cluster serves on with nothing leaked."""

from __future__ import annotations

from random import Random
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.errors import Code
from ryzanstein.rpc import status
from ryzanstein.v1 import inference_pb2 as inference

USER = inference.Message(role=inference.ROLE_USER, content="Hello!")


def chat(**fields: Any) -> inference.ChatRequest:
    return inference.ChatRequest(**{"messages": [USER], **fields})


def sampling(**params: Any) -> inference.ChatRequest:
    return chat(sampling=inference.SamplingParams(**params))


CASES = [
    (inference.ChatRequest(), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "messages"),
    (chat(messages=[inference.Message(content="x")]), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "messages[0].role"),
    (chat(model="nope"), Code.NOT_FOUND, "MODEL_NOT_FOUND", ""),
    (chat(session_id="s" * 200), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "session_id"),
    (sampling(temperature=2.5), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.temperature"),
    (sampling(temperature=float("nan")), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.temperature"),
    (sampling(top_p=0.0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.top_p"),
    (sampling(top_k=0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.top_k"),
    (sampling(min_p=-0.5), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.min_p"),
    (sampling(repetition_penalty=0.0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.repetition_penalty"),
    (sampling(presence_penalty=9.0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.presence_penalty"),
    (sampling(max_tokens=0), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.max_tokens"),
    (sampling(min_tokens=9, max_tokens=8), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.min_tokens"),
    (sampling(n=99), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.n"),
    (sampling(logprobs=50), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.logprobs"),
    (sampling(stop=[""]), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.stop"),
    (sampling(logit_bias={1: 500.0}), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "sampling.logit_bias"),
    (sampling(max_tokens=1_000_000), Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "sampling.max_tokens"),
    (
        chat(messages=[inference.Message(role=inference.ROLE_USER, content="zq " * 5000)]),
        Code.INVALID_ARGUMENT,
        "CONTEXT_TOO_LONG",
        "sampling.max_tokens",
    ),
]


def failure(harness: Any, request: inference.ChatRequest) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        harness.client.inference.Chat(request, timeout=30)
    return status.error_from_rpc(caught.value)


@pytest.mark.parametrize(("request_", "code", "reason", "field"), CASES, ids=[f"{i}-{case[3]}" for i, case in enumerate(CASES)])
@pytest.mark.long
def test_a_bad_request_gets_its_status_and_details(
    calm: Any, request_: inference.ChatRequest, code: Code, reason: str, field: str
) -> None:
    error = failure(calm, request_)
    assert (error.code, error.reason) == (code, reason)
    assert [violation.field for violation in error.violations] == ([field] if field else [])


def test_a_prompt_beyond_the_context_names_the_numbers(calm: Any) -> None:
    error = failure(calm, sampling(max_tokens=1_000_000))
    assert error.metadata["max_tokens"] == "1000000"
    assert int(error.metadata["context_length"]) > 0
    assert int(error.metadata["prompt_tokens"]) > 0


def test_a_token_id_outside_the_vocabulary_is_refused_and_no_rank_is_lost(calm: Any) -> None:
    request = inference.CompleteRequest(token_ids=inference.TokenIds(ids=[5, 1_000_000]))
    with pytest.raises(grpc.RpcError) as caught:
        calm.client.inference.Complete(request, timeout=30)
    assert status.error_from_rpc(caught.value).code is Code.INVALID_ARGUMENT  # type: ignore[arg-type]
    assert all(calm.status(node).rank_restarts == 0 for node in calm.cluster.node_ids)


def test_unknown_things_are_not_found_by_name(calm: Any) -> None:
    stubs = calm.client
    calls = [
        lambda: stubs.sessions.GetSession(inference.GetSessionRequest(session_id="no-such"), timeout=5),
        lambda: stubs.sessions.DeleteSession(inference.DeleteSessionRequest(session_id="no-such"), timeout=5),
        lambda: stubs.inference.CancelGeneration(inference.CancelGenerationRequest(generation_id="no-such"), timeout=5),
        lambda: list(stubs.inference.AttachGeneration(inference.AttachGenerationRequest(generation_id="no-such"), timeout=5)),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        error = status.error_from_rpc(caught.value)  # type: ignore[arg-type]
        assert error.code is Code.NOT_FOUND
        assert error.resource is not None
        assert error.resource[1] == "no-such"


def malformed(rng: Random) -> inference.ChatRequest:
    """A request that is wrong in a random way."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(CASES)[0]
    if kind == 1:
        return sampling(**{rng.choice(["temperature", "presence_penalty", "frequency_penalty", "min_p"]): rng.uniform(3, 1e30)})
    if kind == 2:
        return chat(model="".join(rng.choices("abc\x00é", k=rng.randrange(1, 400))))
    return chat(messages=[inference.Message(role=rng.randrange(4, 1000), content="x" * rng.randrange(1000))])


def test_two_hundred_malformed_requests_leave_the_cluster_serving_and_no_block_held(calm: Any, holds: Any) -> None:
    rng = Random(7)
    codes = {failure(calm, malformed(rng)).code for _ in range(200)}
    assert codes <= {Code.INVALID_ARGUMENT, Code.NOT_FOUND}
    assert calm.client.chat("Hello!").text
    assert holds(lambda: all(calm.status(node).kv_blocks_held == 0 for node in calm.cluster.node_ids), 5)
    assert all(calm.status(node).rank_restarts == 0 for node in calm.cluster.node_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", ""),
        (b"[]", ""),
        (b'{"model": "demo"}', "messages"),
        (b'{"model": "demo", "messages": []}', "messages"),
        (b'{"model": "demo", "messages": [{"role": "wizard", "content": "x"}]}', "messages"),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', "max_tokens"),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}', "tools"),
    ],
)
def test_a_bad_http_body_is_a_400_in_openais_form(calm: Any, body: bytes, param: str) -> None:
    url = f"{calm.cluster.http_url}/v1/chat/completions"
    reply = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=10)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["message"]
    assert param in (error["param"] or "")
