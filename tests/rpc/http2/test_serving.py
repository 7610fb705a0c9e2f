"""The builtin server against clients that send single bytes, too much, nothing, or what is no call."""

from __future__ import annotations

import asyncio
import gzip
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from tests.rpc.http2.raw_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    GREETING,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH,
    RST,
    SETTINGS,
    TRANSPORT,
    WINDOW,
    Service,
    call,
    connected,
    frame,
    head,
    literal,
    serving,
)

from ryzanstein.rpc.http2.frames import PREFACE, ErrorCode
from ryzanstein.rpc.http2.messages import prefixed
from ryzanstein.rpc.http2.serving.call import MAX_UNSENT_BYTES

OK = (grpc.StatusCode.OK, "")
LONG = head(x="a" * 10_000, y="b" * 10_000)
OPEN = frame(HEADERS, END_HEADERS, 1, head("EchoAll"))


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "tls"])
def _transport(request: pytest.FixtureRequest) -> Iterator[None]:
    TRANSPORT.tls = request.param
    yield
    TRANSPORT.tls = False


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 (what changes is a counter)
            await asyncio.sleep(0.005)


async def test_a_call_is_answered_wherever_its_bytes_are_cut() -> None:
    async with serving() as (_, port):
        for at in range(1, len(GREETING + call()), 9):
            async with connected(port, b"") as client:
                client.send((GREETING + call())[:at])
                await asyncio.sleep(0)
                client.send((GREETING + call())[at:])
                assert await client.status() == OK
                assert client.data[1] == prefixed(b"hello")


@pytest.mark.parametrize(
    ("sent", "code", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ErrorCode.PROTOCOL_ERROR, "the client does not speak HTTP/2"),
        (b"\x16\x03\x01\x02\x00\x01", ErrorCode.PROTOCOL_ERROR, "the client does not speak HTTP/2"),
        (GREETING + struct.pack(">IBI", 16_385 << 8, 0, 1), ErrorCode.FRAME_SIZE_ERROR, "a frame of 16385 bytes"),
        (GREETING + frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR, "stream 1 is not open"),
        (GREETING + frame(HEADERS, END_HEADERS, 2, head()), ErrorCode.PROTOCOL_ERROR, "a client opens stream 2"),
        (GREETING + call(3) + call(1), ErrorCode.STREAM_CLOSED, "headers on stream 1, which is closed"),
        (GREETING + OPEN + frame(HEADERS, END_HEADERS, 1, head()), ErrorCode.PROTOCOL_ERROR, "headers within stream 1"),
        (GREETING + OPEN + frame(DATA, END_STREAM, 1) + frame(DATA, 0, 1), ErrorCode.STREAM_CLOSED, "data on stream 1 after"),
        (GREETING + OPEN + frame(DATA, PADDED, 1, b"\5abc"), ErrorCode.PROTOCOL_ERROR, "more padding than payload"),
        (GREETING + frame(HEADERS, 0, 1, head()) + frame(PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR, "not continued"),
        (GREETING + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 40, ErrorCode.ENHANCE_YOUR_CALM, "headers of more"),
        (
            GREETING + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16_000)) * 5,
            ErrorCode.ENHANCE_YOUR_CALM,
            "headers of more",
        ),
        (GREETING + frame(CONTINUATION, 0, 1), ErrorCode.PROTOCOL_ERROR, "a continuation of no headers"),
        (GREETING + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR, "headers cannot be read"),
        (
            GREETING + frame(HEADERS, END_HEADERS, 1, b"\x40" + literal("a" * 60, "b" * 4000)[1:] + b"\xbe" * 30),
            ErrorCode.COMPRESSION_ERROR,
            "headers cannot be read",
        ),
        (GREETING + frame(WINDOW, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes"),
        (GREETING + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR, "a window of more than"),
        (GREETING + OPEN + frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR, "a window of more than"),
        (GREETING + frame(WINDOW, 0, 5, b"\0\0\0\1"), ErrorCode.PROTOCOL_ERROR, "stream 5 is not open"),
        (GREETING + frame(SETTINGS, 0, 0, b"abc"), ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of 3 bytes"),
        (
            GREETING + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)),
            ErrorCode.FLOW_CONTROL_ERROR,
            "a window of more than",
        ),
        (GREETING + frame(PING, 0, 0, b"short"), ErrorCode.FRAME_SIZE_ERROR, "PING of 5 bytes"),
        (GREETING + frame(PUSH, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR, "a frame of type 5 on stream 1"),
        (GREETING + frame(RST, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of 3 bytes"),
        (GREETING + frame(RST, 0, 7, bytes(4)), ErrorCode.PROTOCOL_ERROR, "stream 7 is not open"),
        (GREETING + frame(PING, 0, 0, bytes(8)) * 5, ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings"),
        (GREETING + frame(SETTINGS, 0, 0) * 6000, ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing"),
        (GREETING + frame(PRIORITY, 0, 1, bytes(5)) * 6000, ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry"),
        (GREETING + OPEN + frame(DATA, 0, 1) * 6000, ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing"),
        (GREETING + frame(99, 0, 0) * 6000, ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_a_breach_of_the_protocol_ends_the_connection_with_its_reason(sent: bytes, code: ErrorCode, why: str) -> None:
    async with serving() as (_, port), connected(port, sent) as client:
        gone = await client.goaway()
        assert gone is not None
        assert gone[0] == code
        assert why in gone[1]


async def test_calls_that_are_reset_at_once_end_and_too_many_end_the_connection() -> None:
    service = Service()
    async with serving(service) as (_, port), connected(port) as client:
        for number in range(1, 12_000, 2):
            client.send(frame(HEADERS, END_HEADERS, number, head("Sleep")) + frame(RST, 0, number, b"\0\0\0\x08"))
            if number % 100 == 1:
                await asyncio.sleep(0)
        gone = await client.goaway()
        # Of calls that were refused, a reset is a frame that carries nothing.
        assert gone in [
            (ErrorCode.ENHANCE_YOUR_CALM, f"too many {what}") for what in ("calls are reset", "frames that carry nothing")
        ]
        await until(lambda: not service.running)
        async with connected(port) as another:
            another.send(call())
            assert await another.status() == OK


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (call(method="Nothing"), (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")),
        (call(grpc_timeout="soon"), (grpc.StatusCode.INTERNAL, "grpc-timeout 'soon' is not a duration")),
        (call(x_y_bin="??"), (grpc.StatusCode.INTERNAL, "the value of 'x-y-bin' is not base64")),
        (call(method="Sleep", grpc_timeout="50m"), (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call is over")),
        (call(method="Sleep", grpc_timeout="0n"), (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call is over")),
        (
            call(grpc_encoding="br"),
            (grpc.StatusCode.UNIMPLEMENTED, "the encoding 'br' is not known; known are"),
        ),
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, head()), (grpc.StatusCode.INTERNAL, "the request has no message")),
        (OPEN + frame(DATA, END_STREAM, 1, b"\0\0"), (grpc.StatusCode.INTERNAL, "the request ends within a message")),
        (
            OPEN + frame(DATA, 0, 1, struct.pack(">BI", 0, 2**20 + 1)),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "a message of 1048577 bytes, at most 1048576 are read"),
        ),
        (
            OPEN + frame(DATA, 0, 1, struct.pack(">BI", 1, 3) + b"abc"),
            (grpc.StatusCode.INTERNAL, "a message is compressed, and the encoding is 'identity'"),
        ),
        (
            frame(HEADERS, END_STREAM, 1, LONG[:16_384]) + frame(CONTINUATION, END_HEADERS, 1, LONG[16_384:]),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "metadata of "),
        ),
    ],
    ids=lambda each: str(each[0].name) if isinstance(each, tuple) else "",
)
async def test_a_call_that_cannot_be_taken_ends_with_its_status(sent: bytes, status: tuple[grpc.StatusCode, str]) -> None:
    async with serving() as (_, port), connected(port) as client:
        client.send(sent)
        code, text = await client.status()
        assert code is status[0]
        assert text.startswith(status[1])
        client.send(call(3))
        assert await client.status(3) == OK, "the connection goes on"


@pytest.mark.parametrize(("more", "http"), [({"pseudo_method": "GET"}, "405"), ({"content_type": "text/html"}, "415")])
async def test_what_is_no_call_gets_a_status_of_http(more: dict[str, str], http: str) -> None:
    async with serving() as (_, port), connected(port) as client:
        client.send(call(**more))
        await client.read_until(lambda: 1 in client.ended)
        assert client.headers[1] == {":status": http}


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_requests_are_read_and_bombs_are_not(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    def compressed(data: bytes) -> bytes:
        return struct.pack(">BI", 1, len(data)) + data

    messages = (b"hello" * 100, bytes(2**26), None)
    async with serving() as (_, port), connected(port) as client:
        for number, message in enumerate(messages):
            stream = 2 * number + 1
            body = compressed(b"nothing of that kind" if message is None else compress(message))
            client.send(frame(HEADERS, END_HEADERS, stream, head(grpc_encoding=encoding)))
            client.send(b"".join(frame(DATA, 0, stream, body[at : at + 16_384]) for at in range(0, len(body), 16_384)))
            client.send(frame(DATA, END_STREAM, stream))
        assert await client.status(1) == OK
        assert client.data[1] == prefixed(b"hello" * 100)
        why = "a message of more bytes when it is uncompressed, at most 1048576 are read"
        assert await client.status(3) == (grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        assert (await client.status(5))[0] is grpc.StatusCode.INTERNAL


async def test_calls_beyond_the_bound_are_refused_and_a_cancelled_one_gives_its_place() -> None:
    service = Service()
    async with serving(service, max_calls=3) as (_, port), connected(port) as client:
        for stream in (1, 3, 5):
            client.send(call(stream, "Sleep"))
        await until(lambda: service.running == 3)
        client.send(call(7))
        assert await client.status(7) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        client.send(frame(RST, 0, 1, b"\0\0\0\x08"))
        await until(lambda: service.running == 2)
        client.send(call(9))
        assert await client.status(9) == OK


async def test_connections_beyond_the_bound_are_closed_until_one_ends() -> None:
    async with serving(max_connections=2) as (_, port), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port)) for _ in range(2)]
        for client in clients:
            client.send(call())
            assert await client.status() == OK
        async with connected(port) as third:
            assert await third.goaway() is None
        clients[0].writer.close()
        await clients[0].goaway()
        async with connected(port) as fourth:
            fourth.send(call())
            assert await fourth.status() == OK


async def test_a_client_that_says_nothing_is_closed() -> None:
    async with serving(handshake_s=0.1) as (_, port), connected(port, PREFACE[:10]) as client:
        assert await client.goaway() is None


async def test_a_client_that_does_not_answer_a_ping_is_closed_and_one_that_does_is_not() -> None:
    service = Service()
    async with serving(service) as (server, port):
        server.keepalive_s, server.keepalive_timeout_s = 0.2, 0.2
        async with connected(port) as deaf, connected(port) as alive:
            deaf.send(call(method="Sleep"))
            await until(lambda: service.running == 1)
            for number in range(1, 4):
                await alive.read_until(lambda number=number: alive.pings >= number)  # type: ignore[misc]
                alive.send(frame(PING, ACK, 0, bytes(8)))
            assert await deaf.goaway() is None
            await until(lambda: service.running == 0)
            alive.send(call())
            assert await alive.status() == OK


async def test_a_client_that_does_not_read_holds_its_handler_and_no_memory() -> None:
    service = Service()
    async with serving(service) as (_, port), connected(port) as client:
        client.send(call(method="Endless"))
        await until(lambda: service.running)
        await asyncio.sleep(0.2)
        most = (65_535 + MAX_UNSENT_BYTES) // 10_000 + 3
        assert service.written <= most
        client.send(frame(WINDOW, 0, 0, b"\0\x0f\0\0") + frame(WINDOW, 0, 1, b"\0\x0f\0\0"))
        await until(lambda: service.written > most)
        client.send(frame(RST, 0, 1, b"\0\0\0\x08"))
        await until(lambda: not service.running)


async def test_unfinished_messages_give_way_over_all_connections_the_longest_without_progress_first() -> None:
    message, half = prefixed(bytes(80_000)), 60_000

    def part(stream: int, begin: int, end: int, flags: int = 0) -> bytes:
        chunks = [message[at : min(at + 16_384, end)] for at in range(begin, end, 16_384)]
        return b"".join(frame(DATA, flags if chunk is chunks[-1] else 0, stream, chunk) for chunk in chunks)

    async with serving(max_half_sent_bytes=100_000) as (server, port), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port)) for _ in range(3)]
        clients[0].send(frame(HEADERS, END_HEADERS, 1, head()) + part(1, 0, 30_000))
        await until(lambda: server.half_sent.num_bytes == 30_000)
        clients[1].send(frame(HEADERS, END_HEADERS, 1, head()) + part(1, 0, 30_000))
        await until(lambda: server.half_sent.num_bytes == 60_000)
        clients[0].send(part(1, 30_000, half))
        await until(lambda: server.half_sent.num_bytes == half + 30_000)
        clients[2].send(frame(HEADERS, END_HEADERS, 1, head()) + part(1, 0, 30_000))
        assert (await clients[1].status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: server.half_sent.num_bytes == half + 30_000)
        clients[2].send(frame(RST, 0, 1, b"\0\0\0\x08"))
        await until(lambda: server.half_sent.num_bytes == half)
        room = frame(WINDOW, 0, 0, b"\0\1\0\0") + frame(WINDOW, 0, 1, b"\0\1\0\0")
        clients[0].send(room + part(1, half, len(message), END_STREAM))
        assert await clients[0].status() == OK
        clients[2].send(frame(HEADERS, END_HEADERS, 3, head()) + part(3, 0, half))
        await until(lambda: server.half_sent.num_bytes == half)
        clients[2].writer.transport.abort()
        await until(lambda: server.half_sent.num_bytes == 0)


async def test_a_window_that_the_client_opens_later_lets_the_answer_through() -> None:
    async with serving() as (_, port), connected(port, PREFACE) as client:
        client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)) + call())
        await client.read_until(lambda: 1 in client.headers)
        assert 1 not in client.data
        client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 3)))
        await client.read_until(lambda: client.data)
        assert client.data[1] == prefixed(b"hello")[:3]
        client.send(frame(WINDOW, 0, 1, b"\0\0\1\0"))
        assert await client.status() == OK
        assert client.data[1] == prefixed(b"hello")


async def test_a_stop_lets_calls_end_and_takes_no_new_ones() -> None:
    async with serving() as (server, port), connected(port) as client:
        client.send(OPEN + frame(DATA, 0, 1, prefixed(b"one")))
        await client.read_until(lambda: client.data)
        stopping = asyncio.create_task(server.stop(5))
        await client.read_until(lambda: client.pings)
        client.send(frame(PING, ACK, 0, b"lastcall") + call(3))
        await client.read_until(lambda: client.resets)
        assert client.resets == {3: ErrorCode.REFUSED_STREAM}
        client.send(frame(DATA, END_STREAM, 1, prefixed(b"two")))
        assert await client.status() == OK
        assert client.data[1] == prefixed(b"one") + prefixed(b"two")
        await asyncio.wait_for(stopping, 2)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_a_call_that_outlasts_the_grace_is_cancelled() -> None:
    service = Service()
    async with serving(service) as (server, port), connected(port) as client:
        client.send(call(method="Sleep"))
        await until(lambda: service.running)
        await server.stop(0.1)
        assert service.running == 0
        await client.goaway()


async def test_an_old_connection_ends_when_its_calls_have() -> None:
    async with serving(max_age_s=0.1) as (_, port), connected(port) as client:
        client.send(OPEN)
        await client.read_until(lambda: client.gone)
        client.send(frame(DATA, END_STREAM, 1, prefixed(b"late")))
        assert await client.status() == OK
        assert await client.goaway() is not None


async def test_a_client_that_goes_away_is_closed_after_its_calls() -> None:
    async with serving() as (_, port), connected(port) as client:
        client.send(OPEN + frame(GOAWAY, 0, 0, bytes(8)) + frame(DATA, END_STREAM, 1, prefixed(b"last")))
        assert await client.status() == OK
        await client.goaway()


async def test_large_and_binary_metadata_go_both_ways() -> None:
    async def mirror(request: bytes, context: Any) -> bytes:
        sent = tuple((key, value) for key, value in context.invocation_metadata() if key.startswith("x-"))
        await context.send_initial_metadata((("x-first-bin", b"\0\1\2"),))
        context.set_trailing_metadata(sent)
        return request

    service = Service()
    service.echo = mirror  # type: ignore[method-assign]
    options = (("grpc.max_metadata_size", 2**20), ("grpc.absolute_max_metadata_size", 2**20))
    async with serving(service) as (_, port), TRANSPORT.channel(port, options=options) as channel:
        for metadata in (
            (("x-a-bin", bytes(range(256))), ("x-b", "ü".encode().decode("latin-1")[:0] + "b" * 9000)),
            (("x-c", ""),),
        ):
            answer = channel.unary_unary("/test.Service/Echo")(b"hi", metadata=metadata)
            assert await answer == b"hi"
            assert tuple(await answer.initial_metadata()) == (("x-first-bin", b"\0\1\2"),)
            assert tuple(await answer.trailing_metadata()) == metadata


@pytest.mark.parametrize("size", [0, 16_379, 65_535, 2**20 - 100])
async def test_messages_of_any_size_go_both_ways(size: int) -> None:
    async with serving() as (_, port), TRANSPORT.channel(port) as channel:
        sent = [bytes([number]) * size for number in range(4)]
        assert await channel.unary_unary("/test.Service/Echo")(sent[1]) == sent[1]
        assert [each async for each in channel.stream_stream("/test.Service/EchoAll")(iter(sent))] == sent


async def test_a_client_of_grpc_that_compresses_is_understood() -> None:
    gzipped = grpc.Compression.Gzip
    async with serving() as (_, port), TRANSPORT.channel(port, compression=gzipped) as channel:
        assert await channel.unary_unary("/test.Service/Echo")(b"hello" * 1000) == b"hello" * 1000


async def test_small_messages_that_stand_for_huge_ones_stay_small_until_they_are_read() -> None:
    service, reading = Service(), asyncio.Event()

    async def slowly(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await reading.wait()
        async for request in requests:
            yield len(request).to_bytes(4)

    service.echo_all = slowly  # type: ignore[method-assign]
    bomb = gzip.compress(bytes(2**20 - 1))
    body = b"".join(struct.pack(">BI", 1, len(bomb)) + bomb for _ in range(200))
    async with serving(service) as (_, port), connected(port) as client:
        tracemalloc.start()
        client.send(frame(HEADERS, END_HEADERS, 1, head("EchoAll", grpc_encoding="gzip")))
        client.send(b"".join(frame(DATA, 0, 1, body[at : at + 16_384]) for at in range(0, len(body), 16_384)))
        client.send(frame(DATA, END_STREAM, 1))
        await asyncio.sleep(0.2)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 20 * len(body) < 2**24
        reading.set()
        assert await client.status() == OK
        assert client.data[1] == prefixed((2**20 - 1).to_bytes(4)) * 200


async def test_an_answer_that_its_client_reads_late_is_whole_though_the_server_stops() -> None:
    service = Service()
    answer = bytes(range(256)) * 1000

    async def large(request: bytes, context: Any) -> bytes:
        return answer

    service.echo = large  # type: ignore[method-assign]
    async with serving(service) as (server, port), connected(port) as client:
        client.send(call())
        await client.read_until(lambda: len(client.data.get(1, b"")) >= 65_535)
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0.1)
        client.send(frame(WINDOW, 0, 0, b"\0\x0f\0\0") + frame(WINDOW, 0, 1, b"\0\x0f\0\0"))
        assert await client.status() == OK
        assert client.data[1] == prefixed(answer)
        await asyncio.wait_for(stopping, 2)


async def test_streams_take_turns_when_the_connection_has_little_room() -> None:
    async with serving() as (_, port), connected(port, PREFACE) as client:
        client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**20)))
        for stream in (1, 3, 5):
            client.send(call(stream, "Endless"))
        await client.read_until(lambda: sum(map(len, client.data.values())) >= 65_535)
        before = dict(client.data)
        for _ in range(6):
            client.send(frame(WINDOW, 0, 0, b"\0\0\x10\0"))
        await client.read_until(lambda: sum(map(len, client.data.values())) >= 65_535 + 6 * 4096)
        assert sum(len(client.data.get(stream, b"")) > len(before.get(stream, b"")) for stream in (1, 3, 5)) == 3


async def test_empty_messages_wait_at_the_client_when_nobody_reads_them() -> None:
    service, reading = Service(), asyncio.Event()
    calls: list[Any] = []

    async def waits(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        calls.append(context)
        await reading.wait()
        yield b""

    service.echo_all = waits  # type: ignore[method-assign]
    async with serving(service) as (_, port), connected(port) as client:
        client.send(OPEN)
        empty = frame(DATA, 0, 1, prefixed(b"") * 3000)
        for _ in range(60):
            client.send(empty)
        await until(lambda: calls and len(calls[0]._requests) >= 180_000)
        client.send(empty * 10)
        assert await client.goaway() == (ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window permits")


async def test_what_a_client_did_not_take_before_its_deadline_is_dropped() -> None:
    async with serving() as (_, port), connected(port, PREFACE) as client:
        client.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)) + call(method="Endless", grpc_timeout="100m"))
        assert await client.status() == (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call is over")


async def test_trailers_of_a_call_that_has_just_ended_are_ignored() -> None:
    async with serving() as (_, port), connected(port) as client:
        client.send(frame(HEADERS, END_HEADERS, 1, head()) + frame(DATA, 0, 1, prefixed(b"hello")))
        assert await client.status() == OK
        client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, literal("x-checksum", "1")) + call(3))
        assert await client.status(3) == OK


async def test_a_call_that_is_on_its_way_when_a_connection_is_old_is_taken() -> None:
    async with serving(max_age_s=0.05) as (_, port), connected(port) as client:
        await client.read_until(lambda: client.pings)
        client.send(call() + frame(PING, ACK, 0, b"lastcall"))
        assert await client.status() == OK
        assert await client.goaway() is not None
