"""HTTP/1.1 for a reader of server-sent events, on one connection; no redirects, no keep-alive.

It is our own because a laboratory must see each connection break, and break connections itself (RFC
9112; WHATWG HTML, 9.2).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from ryzanstein.addresses import join_address

_MAX_LINE_BYTES = 2**20
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event; `name` is "message" unless the server sets it."""

    name: str
    event_id: str
    data: str


class HttpAnswer:
    """An answer whose head was read. Close it."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader
        self._writer = writer

    async def body(self) -> str:
        """Returns the whole body. Raises ConnectionError if it breaks off."""
        return b"".join([chunk async for chunk in self._chunks()]).decode(errors="replace")

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        """Yields events as they arrive. Raises ConnectionError if the stream breaks off."""
        pending = b""
        async for chunk in self._chunks():
            *blocks, pending = (pending + chunk).split(b"\n\n")
            for block in blocks:
                yield _event(block.decode(errors="replace"))

    def close(self) -> None:
        self._writer.transport.abort()

    async def _chunks(self) -> AsyncIterator[bytes]:
        try:
            if self.headers.get("transfer-encoding") != "chunked":
                yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))
                return
            while size := int(await self._reader.readline() or b"x", 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
        except (OSError, EOFError, ValueError) as error:
            raise ConnectionError(f"the stream broke: {type(error).__name__}") from None


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request to send; host and length are added."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


async def send(host: str, port: int, request: HttpRequest, tls: ssl.SSLContext | None = None) -> HttpAnswer:
    """Sends a request and reads the head of the answer.

    Raises OSError or ConnectionError if there is none.
    """
    async with asyncio.timeout(_CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES, ssl=tls)
    try:
        fixed = {"host": join_address(host, port), "connection": "close", "content-length": len(request.body)}
        lines = [f"{request.method} {request.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (*fixed.items(), *request.headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + request.body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
        return HttpAnswer(int(head[0].split()[1]), fields, reader, writer)
    except (EOFError, asyncio.LimitOverrunError) as error:
        writer.transport.abort()
        raise ConnectionError(f"no answer: {type(error).__name__}") from None
    except BaseException:
        writer.transport.abort()
        raise


def _event(block: str) -> ServerSentEvent:
    fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
    return ServerSentEvent(fields.get("event", "message"), fields.get("id", ""), fields.get("data", ""))
