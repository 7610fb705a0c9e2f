"""A router with certificates for its clients, as a process: what it refuses to start with, and clients that others wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.public_certificates import CertificateFiles, PublicAuthority, replace
from tests.router.test_process import RouterProcess, get, health, router_process
from websockets.asyncio.client import connect

from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

OPENAI = """
import openai
client = openai.OpenAI(base_url="https://localhost:{port}/v1", api_key="none", max_retries=0)
messages = [{{"role": "user", "content": "hi"}}]
print(client.chat.completions.create(model="demo", messages=messages, max_tokens=3).usage.completion_tokens)
"""


def streamed(tokens: int) -> bytes:
    """A request for a stream of so many tokens."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@dataclass
class SecureRouter:
    """A router process with TLS, linked to a scripted node."""

    process: RouterProcess
    serving: dict[str, Any]
    files: CertificateFiles

    @property
    def grpc_address(self) -> str:
        return f"localhost:{self.serving['grpc_port']}"

    @property
    def http(self) -> str:
        return f"https://localhost:{self.serving['http_port']}"

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self.grpc_address, grpc.ssl_channel_credentials(self.files.ca.read_bytes()))

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.files.ca))

    async def metrics(self) -> str:
        return await get(f"http://127.0.0.1:{self.serving['metrics_port']}/metrics")


@pytest.fixture(scope="module")
def authority() -> PublicAuthority:
    return PublicAuthority()


@pytest.fixture
def files(authority: PublicAuthority, tmp_path: Path) -> CertificateFiles:
    return authority.write(tmp_path / "tls")


@asynccontextmanager
async def secured(node: Any, files: CertificateFiles, state: Path, *flags: str) -> AsyncIterator[SecureRouter]:
    ports = ("--grpc-port", "0", "--http-port", "0", "--nodes", node.address, "--state-dir", str(state))
    async with router_process(*ports, *files.flags, *flags) as process:
        serving = await process.event("serving")
        await process.event("readiness")
        yield SecureRouter(process, serving, files)


async def run(*command: str, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    async with asyncio.timeout(60):
        out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@pytest.mark.parametrize("lacks", ["--tls-cert", "--tls-key"])
async def test_one_file_without_the_other_ends_with_2(files: CertificateFiles, lacks: str) -> None:
    flags = dict(zip(files.flags[::2], files.flags[1::2], strict=True))
    del flags[lacks]
    given = next(iter(flags))
    code, _, error = await run(sys.executable, "-m", "ryzanstein.router", given, flags[given])
    assert code == 2
    assert f"{given[2:].replace('-', '_')} requires {lacks[2:].replace('-', '_')}" in error


async def test_a_pair_that_does_not_fit_ends_with_2_and_names_the_file(
    authority: PublicAuthority, files: CertificateFiles, tmp_path: Path
) -> None:
    replace(files.key, authority.leaf()[1])
    async with router_process(*files.flags, "--state-dir", str(tmp_path / "state")) as router:
        said = (await router.event("bad settings"))["error"]
        assert said == f"{files.key}: is not the key of the first certificate in {files.certificate}"
        assert await asyncio.wait_for(router.process.wait(), 30) == 2


async def test_keys_on_a_public_address_without_tls_are_allowed_with_a_warning(files: CertificateFiles, tmp_path: Path) -> None:
    keys_file, key = tmp_path / "keys.toml", ApiKey.new()
    keys_file.touch(0o600)
    keys_file.write_text(key_text(KeyRecord(key.key_id, key.digest(), "acme", frozenset())))
    flags = ("--host", "0.0.0.0", "--keys-file", str(keys_file), "--state-dir", str(tmp_path / "state"))
    ports = ("--grpc-port", "0", "--http-port", "0")
    warning = "keys cross the network in clear, unless a proxy terminates TLS: see tls_cert"
    async with router_process(*flags, *ports) as router:
        assert (await router.event("serving", warning))["level"] == "warning"
    async with router_process(*flags, *ports, *files.flags) as router:
        assert (await router.event("serving", warning))["tls"] is True


async def test_tls_is_not_keys(files: CertificateFiles) -> None:
    code, _, error = await run(sys.executable, "-m", "ryzanstein.router", "--host", "0.0.0.0", *files.flags)
    assert code == 2
    assert "--keys-file" in error


async def test_clients_that_others_wrote_reach_every_face(start_node: Any, files: CertificateFiles, tmp_path: Path) -> None:
    node = await start_node("a")
    async with secured(node, files, tmp_path / "state") as router:
        async with router.channel() as channel:
            assert await health(channel, "readiness") == health_pb2.HealthCheckResponse.SERVING
            chat = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="hi")])
            assert (await InferenceServiceStub(channel).Chat(chat)).usage.completion_tokens == 16
        code, said, error = await run("curl", "-sS", "-v", "--cacert", str(files.ca), f"{router.http}/v1/models")
        assert code == 0, error
        assert json.loads(said)["data"][0]["id"] == "demo"
        assert "HTTP/1.1 200" in error
        port = str(router.serving["http_port"])
        code, said, error = await run(sys.executable, "-c", OPENAI.format(port=port), SSL_CERT_FILE=str(files.ca))
        assert (code, said.strip()) == (0, "3"), error
        async with connect(
            f"wss://localhost:{port}/v1/ws", ssl=router.context(), subprotocols=["ryzanstein.v1"], proxy=None
        ) as ws:  # type: ignore[list-item]
            body = {"messages": [{"role": "user", "content": "hi"}]}
            await ws.send(json.dumps({"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": body}))
            assert json.loads(await asyncio.wait_for(ws.recv(), 20))["type"] == "accepted"
        metrics = await router.metrics()
        assert 'ryzanstein_router_public_tls_expiry_seconds{file="tls_cert"}' in metrics
        assert 'ryzanstein_router_public_tls_handshakes_total{outcome="done"}' in metrics
        assert 'ryzanstein_router_public_tls_reloads_total{outcome="failed"} 0.0' in metrics


async def test_commands_reach_it_with_its_ca(start_node: Any, files: CertificateFiles, tmp_path: Path) -> None:
    node = await start_node("a")
    async with secured(node, files, tmp_path / "state") as router:
        command = (sys.executable, "-m", "ryzanstein.cli")
        chat = (*command, "chat", "--json", "--router", router.grpc_address, "hi")
        for extra, environment in ((("--ca", str(files.ca)), {}), ((), {"RYZANSTEIN_CA": str(files.ca)})):
            code, said, error = await run(*chat, *extra, **environment)
            assert code == 0, error
            assert json.loads(said)["finish_reason"]
        assert (await run(*chat))[0] == 1
        code, said, error = await run(*command, "usage", "--json", "--router", router.grpc_address, "--ca", str(files.ca))
        assert code == 0, error
        code, _, error = await run(*chat, "--ca", str(files.key))
        assert code == 2
        assert "no certificate" in error


async def test_neither_port_takes_plaintext_and_the_ca_of_the_services_is_worth_nothing(
    start_node: Any, files: CertificateFiles, tmp_path: Path
) -> None:
    node = await start_node("a")
    inner = Authority.new(DEFAULT_TRUST)
    operator = inner.issue(Peer(PeerRole.OPERATOR, "me"))
    async with secured(node, files, tmp_path / "state") as router:
        credentials = (
            None,
            grpc.ssl_channel_credentials(inner.certificate, operator.key, operator.certificate),
        )
        for each in credentials:
            open_it = grpc.aio.insecure_channel if each is None else grpc.aio.secure_channel
            async with open_it(router.grpc_address, *(() if each is None else (each,))) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health(channel, "")
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # With the right CA such a certificate is not asked for, and makes nobody of its owner.
        own = grpc.ssl_channel_credentials(files.ca.read_bytes(), operator.key, operator.certificate)
        async with grpc.aio.secure_channel(router.grpc_address, own) as channel:
            unknown = channel.unary_unary("/ryzanstein.v1.PeerService/CheckSession")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        router.process.process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(router.process.process.communicate(), 30)
    shaken = [entry for line in stderr.decode().splitlines() if "andshake" in (entry := json.loads(line))["event"]]
    assert len(shaken) <= 4
    assert all(entry["level"] in ("info", "debug") and "stack" not in entry for entry in shaken)


async def test_it_drains_under_tls_and_streams_end_whole(start_node: Any, files: CertificateFiles, tmp_path: Path) -> None:
    node = await start_node("a", step_s=0.02)
    async with secured(node, files, tmp_path / "state") as router, router.channel() as channel:
        chat = inference.ChatRequest(
            messages=[inference.Message(role=inference.ROLE_USER, content="hi")],
            sampling=inference.SamplingParams(max_tokens=50),
        )
        stream = aiter(InferenceServiceStub(channel).StreamChat(inference.StreamChatRequest(chat=chat)))
        await anext(stream)
        reader, writer = await asyncio.open_connection(
            "localhost", router.serving["http_port"], ssl=router.context(), server_hostname="localhost"
        )
        writer.write(streamed(50))
        await reader.readuntil(b"data:")
        router.process.process.send_signal(signal.SIGTERM)
        events = [response.event async for response in stream]
        assert events[-1].finished.usage.completion_tokens == 50
        assert b"[DONE]" in await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert await asyncio.wait_for(router.process.process.wait(), 20) == 0


async def test_certificates_change_each_second_under_streams_of_grpc(
    start_node: Any, authority: PublicAuthority, files: CertificateFiles, tmp_path: Path
) -> None:
    node = await start_node("a", step_s=0.02)
    shown: set[bytes] = set()

    def look(port: int) -> bytes:
        context = ssl.create_default_context(cafile=str(files.ca))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            return client.getpeercert(binary_form=True) or b""

    async with secured(node, files, tmp_path / "state") as router, router.channel() as channel:

        async def stream() -> int:
            sampling = inference.SamplingParams(max_tokens=200)
            chat = inference.ChatRequest(
                messages=[inference.Message(role=inference.ROLE_USER, content="hi")], sampling=sampling
            )
            request = inference.StreamChatRequest(chat=chat)
            events = [each.event async for each in InferenceServiceStub(channel).StreamChat(request)]
            return int(events[-1].finished.usage.completion_tokens)

        streams = [asyncio.create_task(stream()) for _ in range(50)]
        for _ in range(4):
            authority.write(files.certificate.parent)
            await asyncio.sleep(1.3)
            current = await asyncio.to_thread(look, router.serving["grpc_port"])
            assert current == await asyncio.to_thread(look, router.serving["http_port"])
            shown.add(current)
        assert await asyncio.gather(*streams) == [200] * 50
    assert len(shown) == 4


async def first_tokens(router: SecureRouter, seconds: float) -> list[float]:
    """Returns how long new clients wait for the first token of a stream, in order; each connects, asks and leaves."""

    context, waited, until = router.context(), [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        async with asyncio.timeout(15):
            reader, writer = await asyncio.open_connection(
                "localhost", router.serving["http_port"], ssl=context, server_hostname="localhost"
            )
            writer.write(streamed(1))
            await reader.readuntil(b"data:")
        waited.append(time.monotonic() - began)
        writer.transport.abort()
        await asyncio.sleep(0.01)
    return sorted(waited)


@pytest.mark.long
async def test_5000_half_open_connections_delay_nobody_are_bounded_and_gone_after_the_timeout(
    start_node: Any, files: CertificateFiles, tmp_path: Path, until: Any
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8000:
        pytest.skip("needs 8,000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 8000), hard))
    node = await start_node("a")
    halves: list[socket.socket] = []

    async def open_halves() -> None:
        for number in range(5000):
            half = socket.socket()
            half.setblocking(False)
            half.connect_ex(("127.0.0.1", router.serving["http_port"]))
            halves.append(half)
            if number % 25 == 0:
                await asyncio.sleep(0.01)

    async def half_open() -> float:
        line = next(line for line in (await router.metrics()).splitlines() if "_handshakes_open " in line and line[0] != "#")
        return float(line.split()[1])

    async with secured(node, files, tmp_path / "state") as router:
        calm = await first_tokens(router, 3)
        opening = asyncio.create_task(open_halves())
        busy = await first_tokens(router, 5)
        await opening
        assert 0 < await half_open() <= 1024
        # What the machine is slow at for other reasons, it was slow at before.
        bound = max(0.1, 3 * calm[-len(calm) // 100])
        assert busy[-len(busy) // 100 - 1] < bound, (calm[-3:], busy[-3:])
        async with asyncio.timeout(15):
            while await half_open():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        for half in halves:
            with contextlib.suppress(ConnectionResetError):
                assert half.recv(1) == b""
            half.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.long
async def test_half_open_grpc_connections_end_after_ten_seconds(
    start_node: Any, files: CertificateFiles, tmp_path: Path
) -> None:
    node = await start_node("a")
    async with secured(node, files, tmp_path / "state") as router:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("localhost", router.serving["grpc_port"])
        assert await asyncio.wait_for(reader.read(), 30) == b""
        assert 8 < time.monotonic() - began < 20
        writer.close()
