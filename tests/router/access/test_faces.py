"""A router with keys, on all three faces: who comes in, what they find, and when they must go."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from tests.router.conftest import RunningRouter, running_router
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text, revoked_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.errors import RyzansteinError
from ryzanstein.router.__main__ import web_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import peer_pb2 as peer
from ryzanstein.v1 import router_pb2 as operators
from ryzanstein.v1.peer_pb2_grpc import PeerServiceStub
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub

ACME, ACME_TOO, GLOBEX, GATEWAY, READER, DEMO_ONLY = (ApiKey.new() for _ in range(6))
STRANGER = ApiKey.new()
SOCKET = Subprotocol("ryzanstein.v1")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def record(key: ApiKey, tenant: str, scopes: frozenset[Scope] = DEFAULT_SCOPES, **more: Any) -> str:
    return key_text(KeyRecord(key.key_id, key.digest(), tenant, scopes, **more))


@dataclass
class Keyed:
    """A router that asks for keys."""

    running: RunningRouter
    url: str
    keys_file: Path

    def revoke(self, key: ApiKey) -> None:
        with self.keys_file.open("a") as file:
            file.write(revoked_text(key.key_id, 1.0))

    def headers(self, key: ApiKey) -> dict[str, str]:
        return {"Authorization": f"Bearer {key.reveal()}"}

    def metadata(self, key: ApiKey) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {key.reveal()}"),)

    async def post(self, key: ApiKey | None, body: Any = None, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            sent = {**({} if key is None else self.headers(key)), **headers}
            return await client.post(f"{self.url}/v1/chat/completions", json=body or CHAT, headers=sent)

    async def get(self, path: str, key: ApiKey | None = None) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(self.url + path, headers={} if key is None else self.headers(key))

    async def chat(self, key: ApiKey, text: str = "hello", **more: Any) -> inference.ChatResponse:
        message = inference.Message(role=inference.ROLE_USER, content=text)
        chat = inference.ChatRequest(messages=[message], sampling=inference.SamplingParams(max_tokens=3), **more)
        response: inference.ChatResponse = await self.running.inference.Chat(chat, metadata=self.metadata(key))
        return response

    def stream(self, key: ApiKey, tokens: int = 2000) -> Any:
        message = inference.Message(role=inference.ROLE_USER, content="hello")
        chat = inference.ChatRequest(messages=[message], sampling=inference.SamplingParams(max_tokens=tokens))
        return self.running.inference.StreamChat(inference.StreamChatRequest(chat=chat), metadata=self.metadata(key))

    def socket(self, key: ApiKey | None, **more: Any) -> Any:
        headers = {} if key is None else self.headers(key)
        url = self.url.replace("http", "ws") + "/v1/ws"
        return connect(url, **{"subprotocols": [SOCKET], "additional_headers": headers, "proxy": None, **more})


@pytest.fixture
async def keyed(start_node: Any, tmp_path: Path) -> AsyncIterator[Keyed]:
    keys_file = tmp_path / "keys.toml"
    keys_file.touch(0o600)
    demo_only = record(DEMO_ONLY, "acme", models=frozenset({"demo"}), max_priority=0)
    other = "".join(
        (
            record(ACME, "acme"),
            record(ACME_TOO, "acme"),
            record(GLOBEX, "globex"),
            record(GATEWAY, "gate", DEFAULT_SCOPES | {Scope.ACT_AS}),
            record(READER, "acme", frozenset({Scope.SESSIONS})),
        )
    )
    keys_file.write_text(other + demo_only)
    node = await start_node("a", step_s=0.005, features=("cache-scopes",))
    settings = RouterSettings(
        nodes=node.address, grpc_port=0, http_port=0, keys_file=keys_file, state_dir=tmp_path / "state", router_id="r"
    )
    async with running_router(settings, 1) as running:
        web = web_face(running.router, settings)
        await web.start()
        yield Keyed(running, f"http://127.0.0.1:{web.port}", keys_file)
        await web.stop(1)


async def refusal(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


PROTECTED = (
    "/v1/models",
    "/v1/models/demo",
    "/version",
    "/openapi.json",
    "/metrics",
    "/v1/ws",
    "//v1/models",
    "/V1/models",
    "/v1/models/",
    "/healthz/",
    "//healthz",
    "/v1/responses/resp_1",
    "/nothing",
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "PUT"])
async def test_without_a_key_all_but_probes_is_401(keyed: Keyed, method: str) -> None:
    async with httpx.AsyncClient() as client:
        for path in PROTECTED:
            answer = await client.request(method, keyed.url + path)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "missing_api_key"
        for path in ("/health", "/healthz", "/readyz"):
            assert (await client.get(keyed.url + path)).status_code == 200


async def test_each_request_of_a_connection_needs_its_key(keyed: Keyed) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(keyed.url.rpartition(":")[2]))
    first = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ACME.reveal()}\r\n\r\n"
    writer.write((first + "GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n").encode())
    received = b""
    while received.count(b"HTTP/1.1 ") < 2:
        received += await asyncio.wait_for(reader.read(4096), 5)
    statuses = [part.split()[0] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401"]
    writer.close()


async def test_without_a_key_every_method_is_unauthenticated_before_its_message_is_read(keyed: Keyed) -> None:
    stubs = keyed.running
    calls = [
        stubs.inference.Chat(inference.ChatRequest()),
        stubs.inference.ListModels(inference.ListModelsRequest()),
        stubs.inference.CountTokens(inference.CountTokensRequest()),
        stubs.inference.CancelGeneration(inference.CancelGenerationRequest()),
        stubs.sessions.CreateSession(inference.CreateSessionRequest()),
        stubs.sessions.ListSessions(inference.ListSessionsRequest()),
        stubs.inference.StreamChat(inference.StreamChatRequest()).read(),
        stubs.inference.AttachGeneration(inference.AttachGenerationRequest()).read(),
    ]
    for call in calls:
        error = await refusal(call)
        assert (error.code.name, error.reason) == ("UNAUTHENTICATED", "KEY_MISSING")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stubs.server.port}") as channel:
        raw = channel.unary_unary("/ryzanstein.v1.InferenceService/Chat")
        error = await refusal(raw(b"\xff" * 2_000_000))
        assert error.reason == "KEY_MISSING", "not MALFORMED_MESSAGE: nobody reads it"
        status = RouterServiceStub(channel).GetRouterStatus(operators.GetRouterStatusRequest())
        assert (await refusal(status)).reason == "KEY_MISSING"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([("Authorization", f"Bearer {STRANGER.reveal()}")], "invalid_api_key"),
        ([("Authorization", "Bearer sk-1234")], "invalid_api_key"),
        ([("Authorization", f"Basic {ACME.reveal()}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {ACME.reveal()[:-1]}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {ACME.reveal()}"), ("X-Api-Key", GLOBEX.reveal())], "key_ambiguous"),
        ([("Authorization", f"Bearer {ACME.reveal()}"), ("Authorization", f"Bearer {ACME.reveal()}")], "key_ambiguous"),
        ([("Authorization", f"Bearer {'a' * 9000}")], "invalid_api_key"),
        ([("X-Api-Key", "rz_\xe9")], "invalid_api_key"),
    ],
    ids=["unknown", "foreign", "scheme", "short", "two", "twice", "long", "not-ascii"],
)
async def test_a_bad_credential_has_one_typed_answer(keyed: Keyed, headers: list[tuple[str, str]], code: str) -> None:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{keyed.url}/v1/chat/completions", json=CHAT, headers=sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, code)


@pytest.mark.parametrize("header", ["Authorization", "authorization", "X-Api-Key", "api-key"])
async def test_a_key_comes_by_any_of_three_headers(keyed: Keyed, header: str) -> None:
    value = f"bEaReR {ACME.reveal()}" if header.lower() == "authorization" else ACME.reveal()
    assert (await keyed.post(None, **{header: value})).status_code == 200


async def test_openai_s_client_has_its_typed_errors(keyed: Keyed) -> None:
    async def ask(key: str, model: str = "demo") -> str:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=0) as client:
            answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
            return answer.choices[0].finish_reason

    assert await ask(ACME.reveal()) in ("stop", "length")
    with pytest.raises(openai.AuthenticationError):
        await ask(STRANGER.reveal())
    with pytest.raises(openai.PermissionDeniedError):
        await ask(READER.reveal())
    with pytest.raises(openai.NotFoundError):
        await ask(DEMO_ONLY.reveal(), "other")


async def test_scopes_models_and_priorities_bound_a_key(keyed: Keyed) -> None:
    error = await refusal(keyed.chat(READER))
    assert (error.reason, error.metadata) == ("SCOPE_MISSING", {"scope": "infer"})
    unknown, denied = await refusal(keyed.chat(ACME, model="nothing")), await refusal(keyed.chat(DEMO_ONLY, model="nothing"))
    assert (unknown.message, unknown.reason) == (denied.message, denied.reason)
    assert (await refusal(keyed.chat(DEMO_ONLY, priority=1))).reason == "PRIORITY_NOT_ALLOWED"
    assert (await keyed.chat(DEMO_ONLY)).model == "demo"
    assert (await keyed.get("/metrics", ACME)).status_code == 403
    status = await keyed.get("/v1/models", DEMO_ONLY)
    assert [model["id"] for model in status.json()["data"]] == ["demo"]


async def test_a_tenant_is_the_key_s_and_only_a_gateway_names_others(keyed: Keyed) -> None:
    await keyed.chat(ACME, session_id="mine")
    for wrong in (("x-tenant-id", "globex"), ("x-tenant-id", "two words")):
        asked = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="hello")])
        error = await refusal(keyed.running.inference.Chat(asked, metadata=(*keyed.metadata(ACME), wrong)))
        assert error.reason in ("TENANT_NOT_YOURS", "INVALID_ARGUMENT")
    assert (await keyed.post(ACME, **{"X-Tenant-Id": "globex"})).status_code == 403
    assert (await keyed.post(ACME, **{"X-Tenant-Id": "acme"})).status_code == 200
    assert (await keyed.post(ACME, X_Tenant_Id="globex")).status_code == 200, "another header, which nobody reads"
    both = [(b"authorization", f"Bearer {GATEWAY.reveal()}".encode()), (b"x-tenant-id", b"acme"), (b"x-tenant-id", b"globex")]
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{keyed.url}/v1/chat/completions", json=CHAT, headers=both)
    assert answer.status_code == 400
    request = inference.GetSessionRequest(session_id="mine")
    own = (*keyed.metadata(GATEWAY), ("x-tenant-id", "acme"))
    assert len((await keyed.running.sessions.GetSession(request, metadata=own)).session.messages) == 2
    assert (
        await refusal(keyed.running.sessions.GetSession(request, metadata=keyed.metadata(GATEWAY)))
    ).code.name == "NOT_FOUND"


async def test_what_one_tenant_has_is_as_unknown_to_another_as_what_never_was(keyed: Keyed) -> None:
    stream = keyed.stream(ACME)
    generation_id = (await stream.read()).event.started.generation_id
    stub, theirs = keyed.running.inference, keyed.metadata(GLOBEX)
    for call in (
        lambda name: stub.CancelGeneration(inference.CancelGenerationRequest(generation_id=name), metadata=theirs),
        lambda name: stub.AttachGeneration(inference.AttachGenerationRequest(generation_id=name), metadata=theirs).read(),
    ):
        known, unknown = await refusal(call(generation_id)), await refusal(call("0" * 32))
        assert known.message.replace(generation_id, "ID") == unknown.message.replace("0" * 32, "ID")
        assert (known.code, known.reason, known.metadata) == (unknown.code, unknown.reason, unknown.metadata)
    for path in (f"/v1/generations/chatcmpl-{generation_id}/events", f"/v1/responses/resp_{generation_id}"):
        assert (await keyed.get(path, GLOBEX)).status_code == 404
    async with keyed.socket(GLOBEX) as socket:
        await socket.send(json.dumps({"type": "attach", "id": "a", "generation": f"chatcmpl-{generation_id}"}))
        assert json.loads(await socket.recv())["status"] == 404
    await stub.CancelGeneration(
        inference.CancelGenerationRequest(generation_id=generation_id), metadata=keyed.metadata(ACME_TOO)
    )
    stream.cancel()


async def test_a_request_key_of_another_tenant_is_another_key(keyed: Keyed) -> None:
    first = await keyed.chat(ACME, request_id="order-1")
    assert (await keyed.chat(ACME_TOO, request_id="order-1")).generation_id == first.generation_id
    assert (await keyed.chat(GLOBEX, "another", request_id="order-1")).generation_id != first.generation_id


async def test_the_cache_scope_of_a_request_is_its_tenant(keyed: Keyed, start_node: Any) -> None:
    await keyed.chat(ACME, user="globex")
    async with keyed.socket(ACME) as socket:
        await socket.send(json.dumps({"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": CHAT}))
        while json.loads(await socket.recv())["type"] != "done":
            pass
    assert (await keyed.post(GLOBEX)).status_code == 200
    generations = keyed.running.router.core._generations  # type: ignore[attr-defined]
    requests = [each.request for each in generations._by_id.values()]
    assert {(each.tenant, each.tenant_named, each.cache_scope) for each in requests} == {
        ("acme", True, "acme"),
        ("globex", True, "globex"),
    }
    assert {each.key_id for each in requests} == {ACME.key_id, GLOBEX.key_id}


async def test_a_browser_s_key_is_a_subprotocol_that_is_not_echoed(keyed: Keyed) -> None:
    offered = [SOCKET, Subprotocol(f"openai-insecure-api-key.{ACME.reveal()}")]
    async with keyed.socket(None, subprotocols=offered) as socket:
        assert socket.subprotocol == SOCKET
        assert ACME.reveal() not in str(dict(socket.response.headers))
    for bad in (None, STRANGER, READER):
        with pytest.raises(InvalidStatus) as refused:
            async with keyed.socket(bad):
                pass
        assert refused.value.response.status_code == (403 if bad is READER else 401)


async def test_a_public_caller_is_no_router(keyed: Keyed) -> None:
    stream = keyed.stream(ACME)
    generation_id = (await stream.read()).event.started.generation_id
    owner = keyed.running.router.core._cluster.owner_id  # type: ignore[attr-defined]
    asked = inference.AttachGenerationRequest(generation_id=generation_id)
    for more in ((), (("x-ryzanstein-owner", owner), ("x-ryzanstein-whole", "true"), ("x-tenant-id", "acme"))):
        call = keyed.running.inference.AttachGeneration(asked, metadata=(*keyed.metadata(GLOBEX), *more))
        assert (await refusal(call.read())).code.name in ("NOT_FOUND", "PERMISSION_DENIED")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{keyed.running.server.port}") as channel:
        asks = PeerServiceStub(channel).CheckSession(
            peer.CheckSessionRequest(session_id="mine"), metadata=(*keyed.metadata(ACME), ("x-ryzanstein-owner", owner))
        )
        assert (await refusal(asks)).code.name == "UNIMPLEMENTED"
        status = RouterServiceStub(channel).GetRouterStatus(operators.GetRouterStatusRequest(), metadata=keyed.metadata(ACME))
        assert (await refusal(status)).reason == "SCOPE_MISSING"
    stream.cancel()


async def test_a_revoked_key_s_streams_end_on_every_face_within_two_seconds(keyed: Keyed) -> None:
    stub = keyed.running.inference
    streams = [keyed.stream(ACME) for _ in range(3)]
    ids = [(await stream.read()).event.started.generation_id for stream in streams]
    streams[2].cancel()  # it goes on, unread
    by_another = stub.AttachGeneration(
        inference.AttachGenerationRequest(generation_id=ids[0]), metadata=keyed.metadata(ACME_TOO)
    )
    await by_another.read()
    others = keyed.stream(ACME_TOO)
    others_id = (await others.read()).event.started.generation_id
    reading = stub.AttachGeneration(inference.AttachGenerationRequest(generation_id=others_id), metadata=keyed.metadata(ACME))
    await reading.read()
    async with keyed.socket(ACME) as socket, httpx.AsyncClient() as client:
        for number in range(2):
            frame = {"type": "submit", "id": str(number), "url": "/v1/chat/completions", "body": {**CHAT, "max_tokens": 2000}}
            await socket.send(json.dumps(frame))
        await socket.recv()
        body = {**CHAT, "max_tokens": 2000, "stream": True}
        request = client.stream("POST", f"{keyed.url}/v1/chat/completions", json=body, headers=keyed.headers(ACME))
        async with request as events:
            keyed.revoke(ACME)
            began = asyncio.get_running_loop().time()
            for ended in (drained(streams[0]), drained(streams[1]), drained(by_another), drained(reading)):
                assert (await ended).reason == "KEY_REVOKED"
            text = (await events.aread()).decode()
            assert '"code": "key_revoked"' in text
            assert await code_of_end(socket) == 4009
            assert asyncio.get_running_loop().time() - began < 2.5
    assert (await refusal(keyed.chat(ACME))).reason == "KEY_REVOKED"
    assert (await keyed.post(ACME)).json()["error"]["code"] == "key_revoked"
    assert (await others.read()).event.HasField("delta"), "another key's own stream goes on"
    others.cancel()
    unread = stub.AttachGeneration(inference.AttachGenerationRequest(generation_id=ids[2]), metadata=keyed.metadata(ACME_TOO))
    assert (await drained(unread)).reason == "KEY_REVOKED"
    assert keyed.running.value("generations_total", model="demo", outcome="revoked") == 6


async def drained(stream: Any) -> RyzansteinError:
    try:
        while await asyncio.wait_for(stream.read(), 5) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as failure:
        return error_from_rpc(failure)
    raise AssertionError("it was not ended")


async def code_of_end(socket: Any) -> int:
    try:
        while True:
            await asyncio.wait_for(socket.recv(), 5)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 0


async def test_no_answer_log_or_metric_has_a_secret(keyed: Keyed, capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for key in (ACME, STRANGER):
        answer = await keyed.post(key)
        texts += [answer.text, str(answer.headers)]
        with contextlib.suppress(grpc.aio.AioRpcError):
            await keyed.chat(key)
    metrics = (await keyed.get("/metrics", ACME)).text
    texts += [metrics, *capfd.readouterr()]
    for secret in (ACME, STRANGER):
        assert not any(secret.secret in text for text in texts)
    assert keyed.running.value("auth_total", face="http", outcome="key_invalid") == 1
