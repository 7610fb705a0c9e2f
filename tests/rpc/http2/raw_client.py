"""A client that sends whatever bytes a test wants, and reads frames."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import grpc
from hpack import Decoder
from tests.public_certificates import PublicAuthority, pem

from ryzanstein.rpc.http2.frames import PREFACE, FrameReader
from ryzanstein.rpc.http2.messages import prefixed
from ryzanstein.rpc.http2.serving.server import Http2Server, ServerBounds
from ryzanstein.rpc.tls.server_context import server_context

DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
BOUNDS = ServerBounds(
    max_request_bytes=2**20, max_response_bytes=2**20, max_calls=100, min_ping_interval_s=0.05, handshake_s=5.0
)
GREETING = PREFACE + struct.pack(">IBI", SETTINGS, 0, 0)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload) << 8 | kind) + struct.pack(">BI", flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """Returns a field as a literal of at most 16,382 bytes, by hand (RFC 7541, section 6.2.2)."""
    return b"\0" + length(len(name)) + name.encode() + length(len(value)) + value.encode()


def length(number: int) -> bytes:
    return bytes((number,)) if number < 127 else bytes((127, (number - 127) & 127 | 128, (number - 127) >> 7))


def head(method: str = "Echo", **more: str) -> bytes:
    """Returns the header block of a call; `more` with underscores for hyphens."""
    fields = {":method": "POST", ":scheme": "http", ":path": f"/test.Service/{method}", ":authority": "t", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    fields |= {name.replace("_", "-").replace("pseudo-", ":"): value for name, value in more.items()}
    return b"".join(literal(*each) for each in fields.items())


def call(stream: int = 1, method: str = "Echo", message: bytes = b"hello", **more: str) -> bytes:
    """Returns a whole call of one message."""
    begin = frame(HEADERS, END_HEADERS, stream, head(method, **more))
    return begin + frame(DATA, END_STREAM, stream, prefixed(message))


class RawClient:
    """A connection. `status` waits for a call's end, `goaway` for the connection's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.data: dict[int, bytes] = {}
        self.headers: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.pings = self.num_settings = 0
        self.gone: tuple[int, str] | None = None
        self.closed = False
        self._decoder = Decoder()
        self._frames = FrameReader(self._take)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case 0:
                self.data[stream] = self.data.get(stream, b"") + payload
            case 1:
                assert flags & END_HEADERS
                self.headers.setdefault(stream, {}).update(self._decoder.decode(payload))
            case 3:
                self.resets[stream] = int.from_bytes(payload)
            case 4:
                self.num_settings += 1
            case 6:
                self.pings += not flags & ACK
            case 7:
                self.gone = int.from_bytes(payload[4:8]), payload[8:].decode()
        if kind in (0, 1) and flags & END_STREAM:
            self.ended.add(stream)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read_until(self, enough: Callable[[], Any], timeout_s: float = 10.0) -> None:
        """Reads until it is enough or the server has closed the connection."""
        async with asyncio.timeout(timeout_s):
            while not enough() and not self.closed:
                try:
                    data = await self.reader.read(65_536)
                except ConnectionError:
                    data = b""
                self.closed = not data
                self._frames.feed(data)

    async def status(self, stream: int = 1) -> tuple[grpc.StatusCode, str]:
        """Returns the status of a call when it has ended."""
        await self.read_until(lambda: stream in self.ended)
        headers: Mapping[str, str] = self.headers[stream]
        codes = {code.value[0]: code for code in grpc.StatusCode}
        return codes[int(headers["grpc-status"])], headers.get("grpc-message", "")

    async def goaway(self) -> tuple[int, str] | None:
        """Returns the code and text with which the server ended the connection; None if it said nothing."""
        await self.read_until(lambda: False)
        return self.gone


class Service:
    """Handlers that count what they do."""

    def __init__(self) -> None:
        self.running = self.begun = self.written = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def echo_all(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def sleep(self, request: bytes, context: Any) -> bytes:
        self.running += 1
        self.begun += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.running -= 1
        return b""

    async def endless(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            while True:
                self.written += 1
                yield bytes(10_000)
        finally:
            self.running -= 1

    @property
    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        handlers: dict[str, Any] = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "EchoAll": grpc.stream_stream_rpc_method_handler(self.echo_all),
            "Sleep": grpc.unary_unary_rpc_method_handler(self.sleep),
            "Endless": grpc.unary_stream_rpc_method_handler(self.endless),
        }
        return grpc.method_handlers_generic_handler("test.Service", handlers)


class Transport:
    """How servers and clients of a test speak: plainly, or with TLS."""

    def __init__(self) -> None:
        self.tls = False

    @cached_property
    def _authority(self) -> PublicAuthority:
        return PublicAuthority()

    @cached_property
    def server(self) -> ssl.SSLContext:
        return server_context(*self._authority.leaf())

    @cached_property
    def roots(self) -> bytes:
        return pem(self._authority.certificate)

    @cached_property
    def client(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.roots.decode())
        context.set_alpn_protocols(["h2"])
        return context

    def channel(self, port: int, **more: Any) -> grpc.aio.Channel:
        """Returns a channel of the library."""
        if self.tls:
            return grpc.aio.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(self.roots), **more)
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", **more)


TRANSPORT = Transport()


@asynccontextmanager
async def serving(service: Service | None = None, **bounds: Any) -> AsyncIterator[tuple[Http2Server, int]]:
    """Yields a server and its port."""
    server = Http2Server([], replace(BOUNDS, **bounds))
    server.add_generic_rpc_handlers(((service or Service()).handlers,))
    tls = TRANSPORT.tls
    port = server.add_tls_port("127.0.0.1:0", lambda: TRANSPORT.server) if tls else server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(port: int, greeting: bytes = GREETING) -> AsyncIterator[RawClient]:
    tls = TRANSPORT.client if TRANSPORT.tls else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    writer.write(greeting)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
