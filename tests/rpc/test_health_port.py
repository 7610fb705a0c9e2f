"""The health port answers health checks without TLS and nothing else, within its bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.health_port import MAX_HEALTH_CONNECTIONS, MAX_HEALTH_REQUEST_BYTES
from ryzanstein.rpc.server import READINESS, STARTUP, RpcServer
from ryzanstein.v1 import (
    adapter_pb2,
    embedding_pb2,
    inference_pb2,
    orchestrator_pb2,
    pages_pb2,
    peer_pb2,
    router_pb2,
    text_pb2,
    usage_pb2,
    worker_pb2,
)

CODE = grpc.StatusCode
CHECK = "/grpc.health.v1.Health/Check"
OURS = [
    f"/{service.full_name}/{method.name}"
    for file in (
        adapter_pb2,
        embedding_pb2,
        inference_pb2,
        orchestrator_pb2,
        pages_pb2,
        peer_pb2,
        router_pb2,
        text_pb2,
        usage_pb2,
        worker_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
FOREIGN = [
    "/grpc.health.v1.Health/Watch",
    "/grpc.health.v1.Health/List",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetServers",
]


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, [], health_port=0)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(f"127.0.0.1:{server.health_port}", retries=False) as channel:
        yield channel


async def state(channel: grpc.aio.Channel, name: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes = b"") -> grpc.StatusCode:
    try:
        await channel.unary_unary(method)(message, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return CODE.OK


async def test_it_says_what_the_services_own_port_says(server: RpcServer, channel: grpc.aio.Channel) -> None:
    assert server.health_port not in (0, server.port)
    assert [await state(channel, name) for name in ("", STARTUP, READINESS)] == ["SERVING", "NOT_SERVING", "NOT_SERVING"]
    await server.set_started()
    await server.set_ready(True)
    assert [await state(channel, name) for name in ("", STARTUP, READINESS)] == ["SERVING"] * 3
    assert await code_of(channel, CHECK, health_pb2.HealthCheckRequest(service="x").SerializeToString()) is CODE.NOT_FOUND


async def test_without_the_setting_there_is_none() -> None:
    server = RpcServer("127.0.0.1", 0, [])
    await server.start()
    assert server.health_port == 0
    await server.stop(0)


@pytest.mark.parametrize("method", [*OURS, *FOREIGN])
async def test_nothing_else_is_there(channel: grpc.aio.Channel, method: str) -> None:
    assert await code_of(channel, method) is CODE.UNIMPLEMENTED


async def test_what_is_no_request_or_too_large_is_refused_and_the_next_is_answered(channel: grpc.aio.Channel) -> None:
    assert await code_of(channel, CHECK, b"\xff\xff") is CODE.INVALID_ARGUMENT
    assert await code_of(channel, CHECK, b"\x0a" + b"x" * MAX_HEALTH_REQUEST_BYTES) is CODE.RESOURCE_EXHAUSTED
    assert await state(channel, "") == "SERVING"


async def test_a_drain_is_seen_at_once_and_until_the_last_call_has_ended(server: RpcServer, channel: grpc.aio.Channel) -> None:
    await server.set_ready(True)
    async with open_channel(f"127.0.0.1:{server.port}") as own:
        watch = health_pb2_grpc.HealthStub(own).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = asyncio.create_task(server.stop(1.0))
        await asyncio.sleep(0)
        assert await state(channel, READINESS) == "NOT_SERVING"
        await asyncio.sleep(0.5)
        assert await state(channel, READINESS) == "NOT_SERVING"
        assert not stopping.done()
        await stopping
    assert await code_of(channel, CHECK) is CODE.UNAVAILABLE


async def test_connections_are_few_and_a_probe_gets_in_again_when_they_are_gone(server: RpcServer) -> None:
    held = [socket.create_connection(("127.0.0.1", server.health_port)) for _ in range(3 * MAX_HEALTH_CONNECTIONS)]
    try:
        await asyncio.sleep(1.0)
        for each in held:
            each.setblocking(False)
        kept = [each for each in held if is_open(each)]
        assert 0 < len(kept) <= MAX_HEALTH_CONNECTIONS
    finally:
        for each in held:
            each.close()
    async with asyncio.timeout(10), open_channel(f"127.0.0.1:{server.health_port}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert (await call).status == health_pb2.HealthCheckResponse.SERVING


def is_open(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    return False


async def test_a_port_that_is_taken_is_an_error(server: RpcServer) -> None:
    second = RpcServer("127.0.0.1", 0, [], health_port=server.health_port)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.health_port}"):
        await second.start()
