"""Servers that do not keep to HTTP/2 or gRPC: the call ends with a reason, nothing grows, and nothing is raised elsewhere."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.rpc.http2.call_end import CallEnd
from ryzanstein.rpc.http2.client_stream import MAX_UNREAD_BYTES, ClientStream
from ryzanstein.rpc.http2.dialing import open_stream
from ryzanstein.rpc.http2.frames import PREFACE
from ryzanstein.rpc.http2.messages import prefixed

MAX_BYTES = 2**20
DATA, HEADERS, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8


class Received:
    """What a call received."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.ends: list[CallEnd] = []
        self.over = asyncio.Event()

    def message(self, data: bytes) -> None:
        assert not self.ends
        self.messages.append(data)

    def writable(self) -> None:
        assert not self.ends

    def ended(self, end: CallEnd) -> None:
        self.ends.append(end)
        self.over.set()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream) + payload


def literals(*headers: tuple[str, str]) -> bytes:
    """Returns a header block of literals, by hand (RFC 7541, section 6.2.2)."""
    return b"".join(bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode() for name, value in headers)


GREETING = frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0)
BEGUN = GREETING + frame(HEADERS, END_HEADERS, 1, literals((":status", "200"), ("content-type", "application/grpc")))
MESSAGE = frame(DATA, 0, 1, prefixed(b"hello"))
TRAILERS = literals(("grpc-status", "5"), ("grpc-message", "no%20such%20thing"))
CONVERSATION = BEGUN + MESSAGE + frame(PING, 0, 0, bytes(8)) + frame(77, 0, 9, b"?") + MESSAGE + frame(HEADERS, 5, 1, TRAILERS)


@asynccontextmanager
async def answered_with(
    answer: bytes, then: Literal["reads", "sleeps", "closes"] = "reads"
) -> AsyncIterator[tuple[Received, ClientStream]]:
    """Yields a call to a server that sends these bytes, whatever it is asked."""

    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())  # type: ignore[arg-type]
        try:
            writer.write(answer)
            await writer.drain()
            while then == "reads" and await reader.read(65_536):
                pass
            await reader.readexactly(24)
            await asyncio.sleep(60 if then == "sleeps" else 0)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    received = Received()
    stream = await open_stream(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "/a.B/C", received, MAX_BYTES)
    try:
        yield received, stream
    finally:
        stream.close()
        server.close()
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "INTERNAL: it answers in HTTP/1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "INTERNAL: a frame of 5460808 bytes"),
        (frame(PING, 0, 0, bytes(8)), "INTERNAL: it does not begin with settings"),
        (frame(DATA, 0, 1, b""), "INTERNAL: data on stream 1 before its headers"),
        (GREETING + MESSAGE, "INTERNAL: data on stream 1 before its headers"),
        (BEGUN + frame(DATA, 0, 3, b""), "INTERNAL: data on stream 3"),
        (GREETING + struct.pack(">IBI", 16_385 << 8, 0, 1), "INTERNAL: a frame of 16385 bytes"),
        (BEGUN + frame(DATA, 0, 1, b"\1\0\0\0\0"), "INTERNAL: a message is compressed"),
        (BEGUN + frame(DATA, 0, 1, struct.pack(">BI", 0, MAX_BYTES + 1)), "RESOURCE_EXHAUSTED: a message of 1048577 bytes"),
        (BEGUN + frame(DATA, PADDED, 1, b"\5abc"), "INTERNAL: more padding than payload"),
        (BEGUN + frame(DATA, PADDED, 1, b""), "INTERNAL: more padding than payload"),
        (BEGUN + frame(DATA, END_STREAM, 1, prefixed(b"x")), "INTERNAL: the answer ended without a status"),
        (BEGUN + frame(HEADERS, 5, 1, literals(("x", "y"))), "INTERNAL: the answer ended without a status"),
        (BEGUN + frame(HEADERS, 5, 1, literals(("grpc-status", "999999999999"))), "UNKNOWN: "),
        (GREETING + frame(HEADERS, 5, 1, literals((":status", "503"))), "UNAVAILABLE: HTTP status 503"),
        (GREETING + frame(HEADERS, 4, 1, literals((":status", "200"), ("content-type", "text/html"))), "UNKNOWN: an answer of"),
        (GREETING + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff"), "INTERNAL: headers cannot be read"),
        (GREETING + frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)), "INTERNAL: headers were not continued"),
        (GREETING + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 70, "INTERNAL: headers of more than"),
        (GREETING + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16_000)) * 5, "INTERNAL: headers of more than"),
        (GREETING + frame(HEADERS, END_HEADERS, 1, literals(*[("a" * 100, "b" * 100)] * 400)[:16_384]), "INTERNAL: headers"),
        (GREETING + frame(CONTINUATION, END_HEADERS, 1), "INTERNAL: a continuation of no headers"),
        (GREETING + frame(PUSH, END_HEADERS, 1, bytes(4)), "INTERNAL: a frame of type 5 on stream 1"),
        (BEGUN + frame(RST, 0, 1, struct.pack(">I", 7)), "UNAVAILABLE: the stream was reset with REFUSED_STREAM"),
        (BEGUN + frame(RST, 0, 1, struct.pack(">I", 99)), "INTERNAL: the stream was reset with code 99"),
        (BEGUN + frame(RST, 0, 1, b""), "INTERNAL: RST_STREAM of 0 bytes"),
        (GREETING + frame(GOAWAY, 0, 0, struct.pack(">II", 0, 11) + b"calm"), "UNAVAILABLE: the server takes no"),
        (GREETING + frame(GOAWAY, 0, 0, b""), "INTERNAL: GOAWAY of 0 bytes"),
        (GREETING + frame(WINDOW, 0, 1, struct.pack(">I", 2**31 - 1)), "INTERNAL: a window of more than"),
        (GREETING + frame(WINDOW, 0, 0, bytes(4)), "INTERNAL: WINDOW_UPDATE of 0 bytes"),
        (GREETING + frame(SETTINGS, 0, 0, b"abc"), "INTERNAL: SETTINGS of 3 bytes"),
        (GREETING + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31)), "INTERNAL: a window of more than"),
        (GREETING + frame(PING, 0, 0, b"short"), "INTERNAL: PING of 5 bytes"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
async def test_a_breach_of_the_protocol_ends_the_call_with_its_reason(answer: bytes, why: str) -> None:
    async with answered_with(answer) as (received, stream):
        await asyncio.wait_for(received.over.wait(), 10)
        assert str(received.ends[0]).startswith(why)
        assert len(received.ends) == 1
        assert not stream.ready


async def test_a_connection_that_closes_ends_the_call() -> None:
    async with answered_with(BEGUN + MESSAGE, then="closes") as (received, _):
        await asyncio.wait_for(received.over.wait(), 10)
        assert received.messages == [b"hello"]
        assert str(received.ends[0]).startswith("UNAVAILABLE: the connection was lost")


async def test_a_server_that_asks_for_answers_and_reads_none_is_left() -> None:
    pings = frame(PING, 0, 0, bytes(8)) * (16 * MAX_UNREAD_BYTES // 17)
    async with answered_with(GREETING + pings, then="sleeps") as (received, _):
        await asyncio.wait_for(received.over.wait(), 30)
        assert received.ends == [CallEnd(grpc.StatusCode.INTERNAL, "it asks for answers and reads none")]


class Wire(asyncio.Transport):
    """A transport that remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0


def fed(pieces: list[bytes]) -> Received:
    """Returns what a call received from these pieces."""
    return asyncio.run(_fed(pieces))


async def _fed(pieces: list[bytes]) -> Received:
    received, wire = Received(), Wire()
    stream = ClientStream({":path": "/a.B/C"}, received, MAX_BYTES)
    stream.connection_made(wire)
    for piece in pieces:
        stream.data_received(piece)
    await asyncio.sleep(0)
    assert wire.written.startswith(PREFACE)
    return received


@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=12).map(sorted))
def test_a_conversation_reads_the_same_wherever_it_is_cut(cuts: list[int]) -> None:
    pieces = [CONVERSATION[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(CONVERSATION)], strict=True)]
    received = fed(pieces)
    assert received.messages == [b"hello", b"hello"]
    assert received.ends == [CallEnd(grpc.StatusCode.NOT_FOUND, "no such thing")]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.builds(frame, st.integers(0, 11), st.integers(0, 255), st.sampled_from([0, 1, 2, 3]), st.binary(max_size=40)),
            st.sampled_from([GREETING, BEGUN, MESSAGE]),
        ),
        max_size=12,
    )
)
def test_no_bytes_raise_or_end_a_call_twice(pieces: list[bytes]) -> None:
    assert len(fed(pieces).ends) <= 1
