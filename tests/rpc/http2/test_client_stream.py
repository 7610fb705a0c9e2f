"""A call on our own connection against servers of the gRPC library, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.rpc.http2.call_end import CallEnd, CallFailedError
from ryzanstein.rpc.http2.client_stream import ClientStream
from ryzanstein.rpc.http2.dialing import open_stream

MAX_BYTES = 8 * 2**20
METHOD = "/test.Service/Stream"
Behavior = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


class Received:
    """What a call received."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.end: asyncio.Future[CallEnd] = asyncio.get_running_loop().create_future()
        self.stream: ClientStream | None = None
        self.room = asyncio.Event()

    def message(self, data: bytes) -> None:
        self.messages.put_nowait(data)

    def writable(self) -> None:
        self.room.set()

    def ended(self, end: CallEnd) -> None:
        self.end.set_result(end)

    async def send(self, data: bytes) -> None:
        """Sends a message when the stream is ready."""
        assert self.stream is not None
        while not self.stream.ready:
            self.room.clear()
            await asyncio.wait_for(self.room.wait(), 20)
        self.stream.send(data)


@asynccontextmanager
async def serving(behavior: Behavior, at: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    most = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    server = grpc.aio.server(options=most)
    handler = grpc.stream_stream_rpc_method_handler(behavior)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Stream": handler}),))
    port = server.add_insecure_port(at)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(0)


@asynccontextmanager
async def calling(address: str, method: str = METHOD) -> AsyncIterator[Received]:
    received = Received()
    received.stream = await open_stream(address, method, received, MAX_BYTES)
    try:
        yield received
    finally:
        received.stream.close()


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def get(received: Received) -> bytes:
    return await asyncio.wait_for(received.messages.get(), 20)


async def ended(received: Received) -> CallEnd:
    return await asyncio.wait_for(received.end, 20)


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 65_535, 2**20, 5 * 2**20])
async def test_messages_of_any_size_go_both_ways_and_keep_their_order(size: int) -> None:
    async with serving(echo) as (address, _), calling(address) as received:
        sent = [bytes([number]) * size for number in range(4)]
        for message in sent:
            await received.send(message)
        assert [await get(received) for _ in sent] == sent


async def test_many_small_messages_arrive_once_and_in_order() -> None:
    async with serving(echo) as (address, _), calling(address) as received:
        sent = [number.to_bytes(4) for number in range(5000)]
        for message in sent:
            await received.send(message)
        assert [await get(received) for _ in sent] == sent


async def test_a_server_that_reads_later_holds_the_messages_back() -> None:
    begin = asyncio.Event()

    async def late(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await begin.wait()
        async for request in requests:
            yield request[:4]

    async with serving(late) as (address, _), calling(address) as received:
        assert received.stream is not None
        sent = 0
        while received.stream.ready and sent < 1000:
            received.stream.send(sent.to_bytes(4) * 65_536)
            sent += 1
            await asyncio.sleep(0.001)
        assert not received.stream.ready, "the server's window bounds what is sent"
        begin.set()
        assert [await get(received) for _ in range(sent)] == [number.to_bytes(4) for number in range(sent)]
        assert received.stream.ready


async def test_a_status_of_the_server_is_told_with_its_text() -> None:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nöt 100% ready\n")

    async with serving(refuse) as (address, _), calling(address) as received:
        assert await get(received) == b"one"
        assert await ended(received) == CallEnd(grpc.StatusCode.FAILED_PRECONDITION, "nöt 100% ready\n")
        assert received.stream is not None
        assert not received.stream.ready


async def test_a_refusal_without_an_answer_is_told() -> None:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield b""

    async with serving(refuse) as (address, _), calling(address) as received:
        assert await ended(received) == CallEnd(grpc.StatusCode.PERMISSION_DENIED, "not you")


async def test_a_method_that_there_is_not_is_unimplemented() -> None:
    async with serving(echo) as (address, _), calling(address, "/test.Service/Other") as received:
        assert (await ended(received)).code is grpc.StatusCode.UNIMPLEMENTED


async def test_close_cancels_the_call_at_the_server() -> None:
    cancelled = asyncio.Event()

    async def waits(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with serving(waits) as (address, _):
        async with calling(address) as received:
            assert await get(received) == b"begun"
        await asyncio.wait_for(cancelled.wait(), 10)
        assert not received.end.done(), "after its close the receiver is not called"


async def test_a_server_that_stops_lets_the_call_go_on_for_its_grace() -> None:
    async with serving(echo) as (address, server), calling(address) as received:
        await received.send(b"before")
        assert await get(received) == b"before"
        stopping = asyncio.create_task(server.stop(2))
        await asyncio.sleep(0.2)
        await received.send(b"while it stops")
        assert await get(received) == b"while it stops"
        await stopping
        assert (await ended(received)).code is not grpc.StatusCode.OK


async def test_a_message_above_the_bound_ends_the_call() -> None:
    async def huge(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield bytes(MAX_BYTES + 1)

    async with serving(huge) as (address, _), calling(address) as received:
        end = await ended(received)
        assert end == CallEnd(
            grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message of {MAX_BYTES + 1} bytes, at most {MAX_BYTES} are read"
        )


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "UNAVAILABLE: no connection to 127.0.0.1:1: "), ("nowhere", "must be host:port")]
)
async def test_without_a_server_there_is_no_call(address: str, why: str) -> None:
    with pytest.raises(CallFailedError, match=why):
        await open_stream(address, METHOD, Received(), MAX_BYTES)


@pytest.mark.parametrize("target", ["localhost:{}", "dns:///127.0.0.1:{}", "dns:localhost:{}", "ipv4:127.0.0.1:{}"])
async def test_a_target_of_grpc_is_found(target: str) -> None:
    async with serving(echo) as (address, _), calling(target.format(address.rpartition(":")[2])) as received:
        await received.send(b"hello")
        assert await get(received) == b"hello"


async def test_a_server_at_a_path_is_found(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/socket"
    async with serving(echo, target), calling(target) as received:
        await received.send(b"hello")
        assert await get(received) == b"hello"
