"""Clients in Python with keys: answers, typed errors, limits, and what HTTP/1.1 says of refused bodies."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2 as details
from grpc_status import rpc_status
from tests.cluster.keyed.conftest import ORIGIN, KeyedCluster
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
    "max_tokens": 8,
}
CHAT = pb.ChatRequest(messages=[pb.Message(role=pb.ROLE_USER, content="Count from 1 to 5.")])


def asked(keyed: KeyedCluster, name: str, max_retries: int = 0, **more: Any) -> tuple[Any, list[tuple[int, float]]]:
    """Returns what OpenAI's client returns or raises, and each answer that it had: its status, and when."""
    seen: list[tuple[int, float]] = []

    def note(response: httpx.Response) -> None:
        seen.append((response.status_code, time.monotonic()))

    carrier = httpx.Client(event_hooks={"response": [note]}, trust_env=False)
    with openai.OpenAI(base_url=keyed.url, api_key=keyed.keys[name], max_retries=max_retries, http_client=carrier) as client:
        try:
            answer: Any = client.chat.completions.create(**{**ASK, **more})
            answer = list(answer) if more.get("stream") else answer
        except openai.APIError as error:
            answer = error
    return answer, seen


def test_openai_s_client_gets_answers_and_its_typed_errors(keyed_cluster: KeyedCluster) -> None:
    whole, _ = asked(keyed_cluster, "acme")
    chunks, _ = asked(keyed_cluster, "acme", stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    kinds = {
        "stranger": (openai.AuthenticationError, "invalid_api_key"),
        "revoked": (openai.AuthenticationError, "key_revoked"),
        "reader": (openai.PermissionDeniedError, "scope_missing"),
    }
    for name, (kind, code) in kinds.items():
        for stream in (False, True):
            error, seen = asked(keyed_cluster, name, max_retries=2, stream=stream)
            assert (type(error), error.code, len(seen)) == (kind, code, 1), "it is not tried again"


def test_openai_s_client_waits_as_long_as_a_rate_says_and_leaves_a_quota_alone(keyed_cluster: KeyedCluster) -> None:
    assert not isinstance(asked(keyed_cluster, "slow-openai")[0], Exception)
    error, seen = asked(keyed_cluster, "slow-openai")
    assert (type(error), error.code, len(seen)) == (openai.RateLimitError, "rate_limit_exceeded", 1)
    headers = error.response.headers
    assert 90_000 < int(headers["retry-after-ms"]) <= 100_000
    assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    asked(keyed_cluster, "patient")
    answer, seen = asked(keyed_cluster, "patient", max_retries=2)
    assert not isinstance(answer, Exception), answer
    assert [status for status, _ in seen] == [429, 200]
    assert seen[1][1] - seen[0][1] < 0.9, "it waits for Retry-After-Ms, not for a second"
    error, seen = asked(keyed_cluster, "poor", max_retries=2)
    assert (type(error), error.code, len(seen)) == (openai.RateLimitError, "insufficient_quota", 1)


def test_limits_are_shown_with_every_answer(keyed_cluster: KeyedCluster) -> None:
    answer = httpx.post(f"{keyed_cluster.url}/chat/completions", json=ASK, headers=keyed_cluster.headers("acme"))
    names = {f"x-ratelimit-{what}-{rate}" for what in ("limit", "remaining", "reset") for rate in ("requests", "tokens")}
    assert answer.status_code == 200
    assert names <= set(answer.headers)
    with grpc.insecure_channel(keyed_cluster.cluster.router_address) as channel:
        _, call = InferenceServiceStub(channel).Chat.with_call(CHAT, metadata=keyed_cluster.metadata("acme"))
        stream = InferenceServiceStub(channel).StreamChat(
            pb.StreamChatRequest(chat=CHAT), metadata=keyed_cluster.metadata("acme")
        )
        assert list(stream)
        for trailing in (call.trailing_metadata(), stream.trailing_metadata()):
            assert names <= {key for key, _ in trailing}


def _refused(keyed: KeyedCluster, name: str | None) -> tuple[grpc.StatusCode, dict[str, Any], dict[str, Any]]:
    """Returns code, details by type and trailing metadata of a refused call."""
    with grpc.insecure_channel(keyed.cluster.router_address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            InferenceServiceStub(channel).Chat(CHAT, metadata=() if name is None else keyed.metadata(name))
        status: Any = rpc_status.from_call(failure.value)
        found = {}
        for packed in status.details:
            for kind in (details.ErrorInfo, details.RetryInfo, details.QuotaFailure):
                message = kind()
                if packed.Unpack(message):
                    found[kind.__name__] = message
        return failure.value.code(), found, dict(failure.value.trailing_metadata())


def test_grpc_refuses_with_details(keyed_cluster: KeyedCluster) -> None:
    for name, code, reason in (
        (None, grpc.StatusCode.UNAUTHENTICATED, "KEY_MISSING"),
        ("stranger", grpc.StatusCode.UNAUTHENTICATED, "KEY_INVALID"),
        ("revoked", grpc.StatusCode.UNAUTHENTICATED, "KEY_REVOKED"),
        ("reader", grpc.StatusCode.PERMISSION_DENIED, "SCOPE_MISSING"),
    ):
        seen, found, _ = _refused(keyed_cluster, name)
        assert (seen, found["ErrorInfo"].reason) == (code, reason)
    with grpc.insecure_channel(keyed_cluster.cluster.router_address) as channel:
        InferenceServiceStub(channel).Chat(CHAT, metadata=keyed_cluster.metadata("slow-grpc"))
    code, found, trailing = _refused(keyed_cluster, "slow-grpc")
    assert (code, found["ErrorInfo"].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 90 < found["RetryInfo"].retry_delay.seconds <= 100
    (violation,) = found["QuotaFailure"].violations
    assert (violation.subject, violation.quota_metric) == ("tenant:slow-grpc", "requests_per_second")
    assert trailing["x-ratelimit-remaining-requests"] == "0"
    code, found, _ = _refused(keyed_cluster, "poor")
    assert (code, found["ErrorInfo"].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXHAUSTED")
    assert "RetryInfo" not in found


def test_a_page_s_socket_brings_its_key_as_a_subprotocol(keyed_cluster: KeyedCluster) -> None:
    url = keyed_cluster.url.replace("http", "ws") + "/ws"

    def offered(name: str) -> list[Subprotocol]:
        return [Subprotocol("ryzanstein.v1"), Subprotocol(f"openai-insecure-api-key.{keyed_cluster.keys[name]}")]

    with connect(url, subprotocols=offered("acme"), origin=ORIGIN, proxy=None) as page:  # type: ignore[arg-type]
        assert page.subprotocol == "ryzanstein.v1"
        page.send(json.dumps({"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": ASK}))
        while json.loads(page.recv(10))["type"] != "done":
            pass
    for name, status in (("stranger", 401), ("revoked", 401), ("reader", 403)):
        with pytest.raises(InvalidStatus) as refused, connect(url, subprotocols=offered(name), proxy=None):
            pass
        assert refused.value.response.status_code == status


def test_a_page_may_read_why_it_is_refused_and_when_to_come_back(keyed_cluster: KeyedCluster) -> None:
    url = f"{keyed_cluster.url}/chat/completions"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx.options(url, headers={"Origin": ORIGIN, **asks})
    assert preflight.status_code == 200, "browsers send no key with it"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for name, status in (("stranger", 401), ("slow-page", 200), ("slow-page", 429)):
        answer = httpx.post(url, json=ASK, headers={"Origin": ORIGIN, **keyed_cluster.headers(name)})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        exposed = {each.strip().lower() for each in answer.headers["access-control-expose-headers"].split(",")}
        assert {each for each in answer.headers if each.startswith(("x-ratelimit-", "retry-after"))} <= exposed
    assert answer.headers["x-ratelimit-reset-requests"]


@pytest.mark.parametrize("header", ["api-key", "x-api-key"])
def test_clients_of_other_vendors_send_the_key_as_they_are_used_to(keyed_cluster: KeyedCluster, header: str) -> None:
    url = f"{keyed_cluster.url}/chat/completions"
    assert httpx.post(url, json=ASK, headers={header: keyed_cluster.keys["acme"]}).status_code == 200
    assert httpx.post(url, json=ASK, headers={header: "EMPTY"}).status_code == 401


def test_a_connection_may_change_its_key_and_head_is_asked_as_get(keyed_cluster: KeyedCluster) -> None:
    with httpx.Client(limits=httpx.Limits(max_connections=1)) as client:
        statuses = [
            client.request(method, f"{keyed_cluster.url}/models", headers=keyed_cluster.headers(name)).status_code
            for name in ("acme", "stranger", "globex", "revoked", "acme")
            for method in ("GET", "HEAD")
        ]
    assert statuses == [200, 200, 401, 401, 200, 200, 401, 401, 200, 200]


def test_a_bad_key_is_refused_before_the_body_is_sent(keyed_cluster: KeyedCluster) -> None:
    size = 4 * 2**20
    port = int(keyed_cluster.cluster.http_url.rpartition(":")[2])
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\nContent-Type: application/json\r\n"
    for expect in ("Expect: 100-continue\r\n", ""):
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(f"{head}{expect}Authorization: Bearer EMPTY\r\n\r\n".encode())
            assert _status(connection) == 401, "at once: nothing of the body was sent"
            if expect:
                continue
            connection.sendall(b"a" * size)
            key = keyed_cluster.keys["acme"]
            connection.sendall(f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            assert _status(connection) == 200, "the connection goes on behind the body"


def _status(connection: socket.socket) -> int:
    """Reads one answer and returns its status."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def test_a_request_key_belongs_to_its_tenant(keyed_cluster: KeyedCluster) -> None:
    def ask(name: str) -> str:
        headers = {**keyed_cluster.headers(name), "Idempotency-Key": "order-1"}
        return str(httpx.post(f"{keyed_cluster.url}/chat/completions", json=ASK, headers=headers).json()["id"])

    assert ask("acme") == ask("acme") != ask("globex")
