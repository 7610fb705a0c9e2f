"""Pings over loopback: who pings as documented stays for ever, who floods is thrown out; no option is one that gRPC ignores."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from ryzanstein.rpc.client import CLIENT_OPTIONS
from ryzanstein.rpc.server import CLIENTS_PING_S, RpcServer, server_options

PERMITTED_S = 0.1


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    """Permits pings PERMITTED_S apart."""
    server = RpcServer("127.0.0.1", 0, [], clients_ping_s=2 * PERMITTED_S)
    await server.start()
    yield server
    await server.stop(0)


@pytest.mark.parametrize("stream", [False, True], ids=["without calls", "idle stream"])
@pytest.mark.long
async def test_two_minutes_of_pings_at_the_documented_rate_are_answered(server: RpcServer, pinger: Any, stream: bool) -> None:
    async with pinger(f"127.0.0.1:{server.port}") as client:
        if stream:
            client.watch_health()
        for _ in range(round(120 / CLIENTS_PING_S)):
            # After the answer: two pings that wait in one socket would be read at once, and be too close.
            await asyncio.sleep(2 * PERMITTED_S)
            assert await client.ping() == ""


@pytest.mark.parametrize("stream", [False, True], ids=["without calls", "idle stream"])
async def test_a_client_that_floods_is_thrown_out(pinger: Any, stream: bool) -> None:
    server = RpcServer("127.0.0.1", 0, [])
    await server.start()
    async with pinger(f"127.0.0.1:{server.port}") as client:
        if stream:
            client.watch_health()
        # Each headers frame of the server's pardons what came before.
        verdicts = [await client.ping()]
        while not verdicts[-1] and len(verdicts) < 100:
            verdicts.append(await client.ping())
    await server.stop(0)
    assert verdicts[-1] == "too_many_pings"


def test_our_own_channels_ping_no_faster_than_documented() -> None:
    assert dict(CLIENT_OPTIONS)["grpc.keepalive_time_ms"] >= 1000 * CLIENTS_PING_S
    assert dict(server_options())["grpc.http2.min_ping_interval_without_data_ms"] < 1000 * CLIENTS_PING_S


@pytest.mark.long
async def test_an_idle_stream_of_a_grpc_client_that_pings_is_never_cut_off(server: RpcServer) -> None:
    """Its pings are a second apart, the fastest that the library sends."""
    options = {**dict(CLIENT_OPTIONS), "grpc.keepalive_time_ms": 1000}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=tuple(options.items())) as channel:
        stream = HealthStub(channel).Watch(HealthCheckRequest())
        assert await stream.read()
        more = asyncio.ensure_future(stream.read())
        await asyncio.wait([more], timeout=6)
        assert not more.done(), more.exception()
        stream.cancel()
        await asyncio.gather(more, return_exceptions=True)


def test_grpc_knows_each_option_that_we_set() -> None:
    names = [name for name, _ in (*server_options(), *CLIENT_OPTIONS)] + ["grpc.service_config", "grpc.enable_retries"]
    with Path(cygrpc.__file__).open("rb") as library, mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ) as text:
        unknown = [name for name in names if text.find(name.encode() + b"\0") < 0]
    assert unknown == [], "gRPC ignores an option that it does not know, without a word"
