"""HTTPS: the same face over TLS, and what a handshake may take. Real sockets, and clients that others wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.responses import StreamingResponse
from tests.public_certificates import CertificateFiles, PublicAuthority, pem, replace
from tests.router.faces.http.conftest import EchoCore, open_door
from websockets.asyncio.client import connect

from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.certificates.public import PublicCertificates
from ryzanstein.router.access.authenticator import Anonymous
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.faces.http.app import create_app
from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds
from ryzanstein.router.faces.http.serving.server import HttpServer
from ryzanstein.router.faces.websocket.face import WebSocketFace
from ryzanstein.router.faces.websocket.limits import SocketLimits
from ryzanstein.router.telemetry import HandshakeMetrics, RouterTelemetry
from ryzanstein.rpc.tls.listener import HandshakeBounds, Handshakes

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
_BODY = json.dumps({"messages": [{"role": "user", "content": "one two"}], "stream": True}).encode()
STREAM = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


@dataclass
class SecureFace:
    """A face behind TLS, its certificates, and how to be a client of it."""

    core: EchoCore
    telemetry: RouterTelemetry
    server: HttpServer
    files: CertificateFiles
    certificates: PublicCertificates

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server.port}"

    def context(self, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.files.ca))
        context.maximum_version = newest
        return context

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=self.context(), timeout=20, trust_env=False)

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.server.port, ssl=self.context(), server_hostname="localhost", **options
        )

    def open(self) -> float:
        return self.telemetry.registry.get_sample_value("ryzanstein_router_public_tls_handshakes_open") or 0.0

    def ended(self, outcome: str) -> float:
        name = "ryzanstein_router_public_tls_handshakes_total"
        return self.telemetry.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


Serve = Callable[..., Awaitable[SecureFace]]


@pytest.fixture(scope="module")
def authority() -> PublicAuthority:
    return PublicAuthority()


@pytest.fixture
async def secure(authority: PublicAuthority, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts faces with bounds of their own."""
    served: list[SecureFace] = []

    async def start(
        handshakes: HandshakeBounds | None = None,
        bounds: ConnectionBounds | None = None,
        limits: HttpLimits | None = None,
        *,
        host: str = "127.0.0.1",
        app: FastAPI | None = None,
    ) -> SecureFace:
        files = authority.write(tmp_path)
        core, telemetry = EchoCore(), RouterTelemetry()
        certificates = PublicCertificates(files.certificate, files.key, CertificateMetrics("test", CollectorRegistry()))
        metrics = HandshakeMetrics(telemetry.registry)
        tls = Handshakes(lambda: certificates.current.context, metrics, handshakes or HandshakeBounds())
        upgrades = WebSocketFace(core, telemetry, Entrance(Anonymous(), CollectorRegistry()), SocketLimits())
        app = app or create_app(core, telemetry, open_door(telemetry), limits)
        server = HttpServer(app, host, 0, bounds, upgrades=upgrades, tls=tls)
        await server.start()
        served.append(SecureFace(core, telemetry, server, files, certificates))
        return served[-1]

    yield start
    for one in served:
        await one.core.close()
        await one.server.stop(1)


@pytest.fixture
async def face(secure: Serve) -> SecureFace:
    return await secure()


async def test_an_openai_client_streams_over_https(face: SecureFace) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{face.url}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(verify=face.context())
    ) as client:
        stream = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "one two three"}], stream=True
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(said) == "one two three"
    assert face.ended("done") == 1


async def test_a_client_that_does_not_trust_the_ca_sends_nothing(face: SecureFace) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"{face.url}/healthz")
    assert face.core.requests == []


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_it_speaks_http_1_1_with_forward_secrecy_and_resumes_sessions(face: SecureFace, newest: ssl.TLSVersion) -> None:
    context = face.context(newest)
    context.set_alpn_protocols(["h2", "http/1.1"])

    def visit(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool, str | None, str]:
        plain = socket.create_connection(("127.0.0.1", face.server.port), timeout=20)
        with context.wrap_socket(plain, server_hostname="localhost", session=session) as client:
            client.sendall(HEALTH)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            cipher = client.cipher()
            return client.session, bool(client.session_reused), client.selected_alpn_protocol(), cipher[0] if cipher else ""

    session, reused, protocol, cipher = await asyncio.to_thread(visit, None)
    assert (reused, protocol) == (False, "http/1.1")
    assert cipher.startswith(("ECDHE-", "TLS_"))
    assert (await asyncio.to_thread(visit, session))[1]


async def test_tls_1_1_is_refused(face: SecureFace) -> None:
    context = face.context()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(OSError):  # noqa: PT011 - an SSLError or a reset, as it comes
        await asyncio.open_connection("127.0.0.1", face.server.port, ssl=context, server_hostname="localhost")
    assert face.ended("failed") == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_a_client_cannot_renegotiate(face: SecureFace) -> None:
    client = await asyncio.create_subprocess_exec(
        *("openssl", "s_client", "-connect", f"127.0.0.1:{face.server.port}", "-tls1_2", "-CAfile", str(face.files.ca)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert client.stdin is not None
    await asyncio.sleep(0.5)
    client.stdin.write(b"R\n")
    await client.stdin.drain()
    await asyncio.sleep(0.5)
    client.stdin.close()
    async with asyncio.timeout(20):
        said, _ = await client.communicate()
    assert b"RENEGOTIATING" in said
    assert b"no renegotiation" in said


async def test_plain_http_gets_an_answer_that_names_https(
    face: SecureFace, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{face.server.port}/v1/models")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "tls_required"
    assert face.ended("plaintext") == 1
    assert face.open() == 0
    assert not [entry for entry in caplog.records if entry.levelname in ("WARNING", "ERROR")]


async def test_garbage_after_a_first_record_ends_the_connection_and_is_counted(face: SecureFace, eventually: Any) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", face.server.port)
    writer.write(b"\x16\x03\x01\xff\xff" + b"x" * 1000)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert not (await reader.read()).startswith(b"HTTP")
    await eventually(lambda: face.ended("failed") == 1, "the handshake is counted")
    writer.close()


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_client_that_goes_no_further_is_gone_after_the_timeout(secure: Serve, eventually: Any, said: bytes) -> None:
    face = await secure(HandshakeBounds(timeout_s=0.5))
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", face.server.port)
    writer.write(said)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert 0.4 < time.monotonic() - began < 5
    writer.close()
    await eventually(lambda: face.ended("timeout") == 1 and face.open() == 0, "it is counted")


@pytest.mark.parametrize("said", [b"", b"\x16"])
async def test_half_open_connections_are_bounded_and_shut_nobody_out(secure: Serve, eventually: Any, said: bytes) -> None:
    face = await secure(HandshakeBounds(max_open=20, timeout_s=30, silent_s=0.05, fair_s=0.2))
    halves = [await asyncio.open_connection("127.0.0.1", face.server.port) for _ in range(60)]
    for _, writer in halves:
        writer.write(said)
    most = 0.0
    async with face.client() as client:
        for _ in range(20):
            began = time.monotonic()
            assert (await client.get("/healthz", headers={"Connection": "close"})).status_code == 200
            assert time.monotonic() - began < 5
            most = max(most, face.open())
    assert 0 < most <= 20
    await eventually(lambda: face.ended("evicted") >= 40, "the oldest made room")
    for _, writer in halves:
        writer.close()


async def test_clients_that_all_come_at_once_are_all_served(secure: Serve) -> None:
    """Nobody's handshake is slow here, so nobody's is ended to make room."""
    face = await secure(HandshakeBounds(max_open=50, silent_s=5, fair_s=5))

    async def visit() -> bytes:
        reader, writer = await face.connect()
        writer.write(HEALTH)
        answer = await reader.readuntil(b"\r\n")
        writer.close()
        return answer

    assert set(await asyncio.gather(*(visit() for _ in range(200)))) == {b"HTTP/1.1 200 OK\r\n"}
    assert face.ended("evicted") == 0


async def test_beyond_the_connections_the_newest_is_told_so(secure: Serve) -> None:
    face = await secure(bounds=ConnectionBounds(max_connections=1))
    face.core.pause_at = 1
    reader, writer = await face.connect()
    writer.write(STREAM)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    second, refused = await face.connect()
    async with asyncio.timeout(20):
        assert (await second.read()).startswith(b"HTTP/1.1 503")
    for each in (writer, refused):
        each.close()


async def test_a_certificate_with_its_chain_is_trusted_by_who_knows_the_root_alone(
    secure: Serve, authority: PublicAuthority
) -> None:
    face = await secure()
    below = PublicAuthority(authority)
    certificate, key = below.leaf()
    replace(face.files.key, key)
    replace(face.files.certificate, certificate + pem(below.certificate))
    await face.certificates.look()
    async with face.client() as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_certificates_change_under_streams_of_which_none_fails(
    secure: Serve, authority: PublicAuthority, chat: Any
) -> None:
    face = await secure()
    face.core.pause_at = 3
    shown: set[int] = set()

    async def stream(client: httpx.AsyncClient) -> str:
        async with client.stream("POST", "/v1/chat/completions", json=chat("one two three four five", stream=True)) as answer:
            return "".join([text async for text in answer.aiter_text()])

    async def newcomer() -> None:
        reader, writer = await face.connect()
        certificate = writer.get_extra_info("peercert")
        shown.add(int(certificate["serialNumber"], 16))
        writer.write(HEALTH)
        assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
        writer.close()

    async with face.client() as client:
        client._transport._pool._max_connections = 100  # type: ignore[attr-defined]
        streams = [asyncio.create_task(stream(client)) for _ in range(50)]
        for _ in range(10):
            authority.write(face.files.certificate.parent)
            await face.certificates.look()
            await newcomer()
            await asyncio.sleep(0.05)
        face.core.resume.set()
        answers = await asyncio.gather(*streams)
    assert len(shown) == 10
    assert all(answer.endswith("data: [DONE]\n\n") and "five" in answer for answer in answers)
    assert face.ended("failed") == 0


async def test_an_8_mib_body_arrives(secure: Serve, chat: Any) -> None:
    face = await secure(limits=HttpLimits(max_body_bytes=16 * 2**20))
    text = "word " * (8 * 2**20 // 5)
    async with face.client() as client:
        answer = await client.post("/v1/chat/completions", json=chat(text, max_tokens=1))
    assert answer.status_code == 200
    assert len(face.core.requests[0].prompt.messages[0].content) == len(text)  # type: ignore[union-attr]


async def test_what_a_slow_reader_does_not_read_is_bounded(secure: Serve) -> None:
    app, sent = FastAPI(), [0]

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                sent[0] += 65_536
                yield b"x" * 65_536
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    face = await secure(app=app)
    reader, writer = await face.connect(limit=65_536)
    writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readexactly(1000)
    await asyncio.sleep(0.5)
    before = sent[0]
    await asyncio.sleep(0.5)
    assert sent[0] == before, "it goes on though nobody reads"
    assert before < 16 * 2**20
    for _ in range(300):
        await reader.readexactly(65_536)
    assert sent[0] > before
    writer.transport.abort()


async def test_a_websocket_carries_many_streams(face: SecureFace) -> None:
    url = f"wss://localhost:{face.server.port}/v1/ws"
    async with connect(url, ssl=face.context(), subprotocols=["ryzanstein.v1"], proxy=None) as socket:  # type: ignore[list-item]
        for number in range(32):
            body = {"messages": [{"role": "user", "content": f"{number} two three"}]}
            await socket.send(json.dumps({"type": "submit", "id": f"s{number}", "url": "/v1/chat/completions", "body": body}))
        said: dict[str, str] = {}
        ended = 0
        async with asyncio.timeout(20):
            while ended < 32:
                frame = json.loads(await socket.recv())
                if frame["type"] == "chunk":
                    delta = frame["chunk"]["choices"][0]["delta"].get("content", "")
                    said[frame["id"]] = said.get(frame["id"], "") + delta
                ended += frame["type"] in ("end", "done", "finished", "error")
    assert said == {f"s{number}": f"{number} two three" for number in range(32)}


async def test_it_listens_on_ipv6(secure: Serve) -> None:
    face = await secure(host="::1")
    async with httpx.AsyncClient(verify=face.context(), trust_env=False) as client:
        assert (await client.get(f"https://[::1]:{face.server.port}/healthz")).status_code == 200


async def test_running_answers_end_whole_when_the_server_stops_and_half_open_ones_are_closed(face: SecureFace) -> None:
    face.core.pause_at = 1
    reader, writer = await face.connect()
    writer.write(STREAM)
    await reader.readuntil(b"one")
    silent, half = await asyncio.open_connection("127.0.0.1", face.server.port)
    await asyncio.sleep(0.1)
    stopping = asyncio.create_task(face.server.stop(10))
    async with asyncio.timeout(20):
        assert await silent.read() == b""
        face.core.resume.set()
        # The end is said in TLS: a reader who got no close_notify would raise.
        assert b"[DONE]" in await reader.read()
        await stopping
    for each in (writer, half):
        each.close()
