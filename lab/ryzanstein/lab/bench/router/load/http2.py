"""An HTTP/2 client connection (RFC 9113) for gRPC server streams, with only what these need.

A benchmark's client must cost less than what it measures. This one spends about a tenth of what a
gRPC library's asyncio client spends on a message. Request headers are sent as literals (RFC 7541, 6.2.2),
and the server is allowed no dynamic table: no state needs to be kept in sync, and equal header blocks, which
nearly all are, are decoded once.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Callable
from typing import Protocol, cast

from ryzanstein.lab.bench.router.load.call_end import problem_of_headers

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_HEADER_BYTES = 9
_DEFAULT_WINDOW = 65_535
WINDOW_BYTES = 2**20
Headers = tuple[tuple[str, str], ...]


class Http2Stream(Protocol):
    """The receiver of one stream. `ended` is the last call; an empty problem is a proper end."""

    def data(self, payload: bytes) -> None: ...

    def ended(self, problem: str) -> None: ...


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream_id) + payload


def _literals(*headers: tuple[str, str]) -> bytes:
    """Returns header fields without indexing; names and values must be shorter than 127 bytes."""
    fields = ((name.encode(), value.encode()) for name, value in headers)
    return b"".join(bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in fields)


class Http2Connection(asyncio.Protocol):
    """One connection with many streams.

    `open` them one at a time or many at once; `transport` may be paused to read slowly.
    """

    def __init__(self, authority: str, window_bytes: int = WINDOW_BYTES, headers: Headers = ()) -> None:
        self.transport: asyncio.Transport
        self._authority = authority
        self._headers = headers
        self._window_bytes = window_bytes
        self._streams: dict[int, Http2Stream] = {}
        self._consumed: dict[int, int] = {0: 0}
        self._last_id = -1
        self._unread = b""
        self._block, self._block_ends = b"", False
        self._act: dict[int, Callable[[int, int, bytes], None]] = {
            _DATA: self._on_data,
            _HEADERS: self._on_headers,
            _CONTINUATION: self._on_continuation,
            _RST_STREAM: self._on_reset,
            _SETTINGS: self._on_settings,
            _PING: self._on_ping,
            _GOAWAY: self._on_goaway,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an isinstance check: uvloop's transports only look like asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, self._window_bytes)
        self.transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        if self._window_bytes > _DEFAULT_WINDOW:
            self.transport.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._window_bytes - _DEFAULT_WINDOW)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose_all("connection lost")

    def open(self, path: str, message: bytes, stream: Http2Stream) -> None:
        """Begins a gRPC call with one request message."""
        self._last_id += 2
        stream_id = self._last_id
        self._streams[stream_id] = stream
        self._consumed[stream_id] = 0
        headers = _literals(
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *self._headers,
        )
        body = struct.pack(">BI", 0, len(message)) + message
        self.transport.write(_frame(_HEADERS, _END_HEADERS, stream_id, headers) + _frame(_DATA, _END_STREAM, stream_id, body))

    def data_received(self, data: bytes) -> None:
        unread, at = self._unread + data, 0
        while len(unread) - at >= _HEADER_BYTES:
            length_and_kind, flags, stream_id = struct.unpack_from(">IBI", unread, at)
            end = at + _HEADER_BYTES + (length_and_kind >> 8)
            if end > len(unread):
                break
            act = self._act.get(length_and_kind & 0xFF)
            if act is not None:
                act(flags, stream_id, unread[at + _HEADER_BYTES : end])
            at = end
        self._unread = unread[at:]

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._streams.get(stream_id)
        self._consume(0, len(payload))
        if stream is None:
            return
        stream.data(payload)
        if flags & _END_STREAM:
            self._end(stream_id, "no grpc-status")
        else:
            self._consume(stream_id, len(payload))

    def _consume(self, stream_id: int, num_bytes: int) -> None:
        """Returns window credit in large pieces."""
        self._consumed[stream_id] += num_bytes
        if self._consumed[stream_id] > min(self._window_bytes, _DEFAULT_WINDOW) // 2:
            self.transport.write(_frame(_WINDOW_UPDATE, 0, stream_id, struct.pack(">I", self._consumed[stream_id])))
            self._consumed[stream_id] = 0

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Takes the headers, or the trailers, of an answer. No server pads them or gives them a priority."""
        self._block, self._block_ends = b"", bool(flags & _END_STREAM)
        self._on_continuation(flags, stream_id, payload)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._block += payload
        if flags & _END_HEADERS:
            problem = problem_of_headers(self._block, last=self._block_ends)
            if problem or self._block_ends:
                self._end(stream_id, problem)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._end(stream_id, f"reset: code {int.from_bytes(payload)}")

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & _ACK:
            self.transport.write(_frame(_SETTINGS, _ACK, 0, b""))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & _ACK:
            self.transport.write(_frame(_PING, _ACK, 0, payload))

    def _on_goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._lose_all(f"GOAWAY: code {int.from_bytes(payload[4:8])}")

    def _end(self, stream_id: int, problem: str) -> None:
        stream = self._streams.pop(stream_id, None)
        self._consumed.pop(stream_id, None)
        if stream is not None:
            stream.ended(problem)

    def _lose_all(self, problem: str) -> None:
        for stream_id in list(self._streams):
            self._end(stream_id, problem)


async def connect(
    port: int, window_bytes: int = WINDOW_BYTES, headers: Headers = (), tls: ssl.SSLContext | None = None
) -> Http2Connection:
    """Connects to a server on this machine; `headers` are sent with each request. Raises OSError if there is none."""
    made = lambda: Http2Connection(f"127.0.0.1:{port}", window_bytes, headers)  # noqa: E731
    name = None if tls is None else "localhost"
    _, connection = await asyncio.get_running_loop().create_connection(made, "127.0.0.1", port, ssl=tls, server_hostname=name)
    return connection
