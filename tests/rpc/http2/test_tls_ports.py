"""The builtin server's ports with TLS: who gets no further than the handshake, and what a call learns of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tests.rpc.http2.raw_client import GREETING, TRANSPORT, call, connected, serving

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.material import LiveMaterial
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.tls.client_context import client_context as client_context_of
from ryzanstein.rpc.tls.handshake_counts import REASONS
from ryzanstein.rpc.tls.service_tls import ServiceTls

OK = (grpc.StatusCode.OK, "")


@pytest.fixture(autouse=True)
def _tls() -> Iterator[None]:
    TRANSPORT.tls = True
    yield
    TRANSPORT.tls = False


def client_context(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=TRANSPORT.roots.decode())
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@pytest.mark.parametrize("protocols", [(), ("http/1.1",)])
async def test_a_client_that_does_not_agree_on_http2_is_closed(protocols: tuple[str, ...]) -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection("localhost", port, ssl=client_context(*protocols))
        writer.write(GREETING + call())
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.transport.abort()
        async with connected(port) as another:
            another.send(call())
            assert await another.status() == OK


async def test_http2_with_tls_1_2_is_served() -> None:
    async with serving() as (_, port):
        context = client_context("h2")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.2"
        writer.write(GREETING + call())
        async with asyncio.timeout(10):
            await reader.readuntil(b"hello")
        writer.transport.abort()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", GREETING])
async def test_who_makes_no_handshake_is_closed_in_time(said: bytes) -> None:
    async with serving(handshake_s=0.3) as (_, port):
        halves = [await asyncio.open_connection("localhost", port) for _ in range(20)]
        for _, writer in halves:
            writer.write(said)
        async with connected(port) as honest:
            honest.send(call())
            assert await honest.status() == OK
        async with asyncio.timeout(10):
            for reader, _ in halves:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in halves:
            writer.transport.abort()


def _greet(port: int, context: ssl.SSLContext, name: str) -> None:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        secure.sendall(GREETING)
        secure.recv(65_536)


def _say(port: int, what: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(what)
        plain.shutdown(socket.SHUT_WR)
        plain.recv(65_536)


async def test_handshakes_are_counted_by_outcome_and_those_that_fail_by_reason(tmp_path: Path) -> None:
    authority, peer, other = Authority.new(DEFAULT_TRUST), Peer(PeerRole.ORCHESTRATOR), Peer(PeerRole.ROUTER, "r-1")
    for each, name in ((peer, "server"), (other, "client")):
        authority.write(each, tmp_path / name)
    Authority.new(DEFAULT_TRUST).write(other, tmp_path / "stranger")
    registry = CollectorRegistry()
    tls = ServiceTls.open(tmp_path / "server", DEFAULT_TRUST, peer, TlsMetrics("test", CollectorRegistry()))
    server = RpcServer("127.0.0.1", 0, [], tls=tls, metrics=RpcMetrics("test", registry))
    await server.start()

    def context(name: str) -> ssl.SSLContext:
        live = LiveMaterial(tmp_path / name, DEFAULT_TRUST, TlsMetrics("test", CollectorRegistry()))
        return client_context_of(live.current)

    stranger, distrustful = context("stranger"), context("stranger")
    nameless = ssl.create_default_context(cadata=tls.material.current.roots.decode())
    nameless.set_alpn_protocols(["h2"])
    stranger.load_verify_locations(cadata=tls.material.current.roots.decode())
    dated = context("client")
    dated.maximum_version = ssl.TLSVersion.TLSv1_2

    def counted(name: str, **label: str) -> float:
        return registry.get_sample_value(f"ryzanstein_test_rpc_tls_{name}_total", {"port": "services", **label}) or 0.0

    async def all_failed() -> None:
        while counted("handshakes", outcome="failed") < sum(expected.values()):  # noqa: ASYNC110 (it is a metric)
            await asyncio.sleep(0.01)

    expected = {"certificate_required": 1, "unknown_ca": 1, "client_alert": 1, "protocol_version": 1, "closed": 2}
    try:
        for each in (context("client"), nameless, stranger, distrustful, dated):
            await asyncio.to_thread(_greet, server.tls_port, each, peer.server_name(DEFAULT_TRUST))
        for what in (b"GET / HTTP/1.1\r\n\r\n", b"", b"\x16\x03\x01"):
            await asyncio.to_thread(_say, server.tls_port, what)
        await asyncio.wait_for(all_failed(), 10)
        assert {reason: counted("handshake_failures", reason=reason) for reason in REASONS} == {
            reason: expected.get(reason, 0) for reason in REASONS
        }
        assert counted("handshakes", outcome="done") == counted("handshakes", outcome="plaintext") == 1
    finally:
        await server.stop(0)


async def test_a_port_that_asks_for_certificates_resumes_no_session(tmp_path: Path) -> None:
    """A session of TLS 1.2 would let a client in for two hours whose certificate was checked once."""
    authority, peer = Authority.new(DEFAULT_TRUST), Peer(PeerRole.ORCHESTRATOR)
    for each, name in ((peer, "server"), (Peer(PeerRole.ROUTER, "r-1"), "client")):
        authority.write(each, tmp_path / name)
    tls = ServiceTls.open(tmp_path / "server", DEFAULT_TRUST, peer, TlsMetrics("test", CollectorRegistry()))
    server = RpcServer("127.0.0.1", 0, [], tls=tls)
    await server.start()
    context = client_context_of(
        LiveMaterial(tmp_path / "client", DEFAULT_TRUST, TlsMetrics("test", CollectorRegistry())).current
    )

    def shake(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", server.tls_port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=peer.server_name(DEFAULT_TRUST), session=session) as secure,
        ):
            secure.sendall(GREETING)
            secure.recv(65_536)  # a ticket would have come before
            return secure.session, secure.session_reused

    try:
        first, _ = await asyncio.to_thread(shake, None)
        assert (await asyncio.to_thread(shake, first))[1] is False
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(shake, None)
    finally:
        await server.stop(0)


async def test_a_set_that_openssl_refuses_ends_the_start_and_later_the_handshakes(tmp_path: Path) -> None:
    peer = Peer(PeerRole.ORCHESTRATOR)
    Authority.new(DEFAULT_TRUST).write(peer, tmp_path / "server")
    tls = ServiceTls.open(tmp_path / "server", DEFAULT_TRUST, peer, TlsMetrics("test", CollectorRegistry()))
    port = tls.certificates()
    good, chain = port.context(), tls.material.current.chain
    assert port.context() is good
    object.__setattr__(tls.material.current, "chain", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    tls.material.version += 1
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            port.context()
    with pytest.raises(OSError, match="cannot listen on"):
        await RpcServer("127.0.0.1", 0, [], tls=tls).start()
    object.__setattr__(tls.material.current, "chain", chain)
    assert port.context() is not good


async def _context_of_a_call(folder: Path, *, builtin: bool) -> dict[str, list[str]]:
    """Returns what a call of a router learns of its connection."""
    authority, router = Authority.new(DEFAULT_TRUST), Peer(PeerRole.ROUTER, "r-1")
    server_peer = Peer(PeerRole.ORCHESTRATOR)
    authority.write(server_peer, folder / "server")
    authority.write(router, folder / "client")
    tls = ServiceTls.open(folder / "server", DEFAULT_TRUST, server_peer, TlsMetrics("test", CollectorRegistry()))

    async def told(request: bytes, context: Any) -> bytes:
        found = context.auth_context()
        return json.dumps({name: [value.decode() for value in values] for name, values in found.items()}).encode()

    server = RpcServer("127.0.0.1", 0, [], tls=tls, builtin=builtin)
    method = "/grpc.health.v1.Health/Tell"  # that any role may call
    handlers = {"Tell": grpc.unary_unary_rpc_method_handler(told)}
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),))
    await server.start()
    try:
        material = LiveMaterial(folder / "client", DEFAULT_TRUST, TlsMetrics("test", CollectorRegistry())).current
        credentials = grpc.ssl_channel_credentials(material.roots, material.key, material.chain)
        options = (("grpc.ssl_target_name_override", server_peer.server_name(DEFAULT_TRUST)),)
        async with grpc.aio.secure_channel(f"127.0.0.1:{server.tls_port}", credentials, options) as channel:
            return dict(json.loads(await channel.unary_unary(method)(b"", timeout=10)))
    finally:
        await server.stop(0)


async def test_a_call_learns_the_same_of_its_connection_as_with_the_library(tmp_path: Path) -> None:
    ours = await _context_of_a_call(tmp_path / "ours", builtin=True)
    library = await _context_of_a_call(tmp_path / "library", builtin=False)
    assert ours["peer_uri"] == library["peer_uri"] != []
    for name in ("transport_security_type", "security_level", "x509_subject_alternative_name", "peer_dns"):
        assert ours.get(name, []) == library.get(name, []), name
    shown = (tmp_path / "ours" / "client" / "tls.crt").read_text()
    assert ours["x509_pem_cert"] == [shown[: len(ours["x509_pem_cert"][0])]]
