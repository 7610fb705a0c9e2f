"""An HTTP server on a real socket whose every byte a test decides."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Behaviour = Callable[["Exchange"], Awaitable[None]]
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Exchange:
    """A request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    gone: asyncio.Event

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: object, status: str = "200 OK", headers: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def events(self, *payloads: object, end: bool = True) -> None:
        """Answers with a stream of events; an object is sent as JSON."""
        await self.send(EVENTS)
        for payload in payloads:
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            await self.chunk(b"data: " + data + b"\n\n")
        if end:
            await self.send(b"0\r\n\r\n")


@dataclass
class Stub:
    """What came to the server, and how it behaves: by path, else `otherwise`."""

    address: str = ""
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    otherwise: Behaviour | None = None
    requests: list[Exchange] = field(default_factory=list)
    connections: int = 0

    def at(self, path: str, body: object, status: str = "200 OK", headers: str = "") -> None:
        """Answers a path with this JSON."""

        async def behave(exchange: Exchange) -> None:
            await exchange.answer(body, status, headers)

        self.behaviours[path] = behave

    def streams(self, path: str, *payloads: object) -> None:
        """Answers a path with these events."""

        async def behave(exchange: Exchange) -> None:
            await exchange.events(*payloads)

        self.behaviours[path] = behave


@asynccontextmanager
async def stub_server(host: str = "127.0.0.1", socket: str = "", tls: ssl.SSLContext | None = None) -> AsyncIterator[Stub]:
    stub = Stub()
    open_writers: set[asyncio.StreamWriter] = set()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
        open_writers.add(writer)
        stub.connections += 1
        try:
            while (exchange := await _read(reader, writer)) is not None:
                stub.requests.append(exchange)
                behaviour = stub.behaviours.get(exchange.path, stub.otherwise)
                if behaviour is None:
                    await exchange.answer({"error": {"message": "no such path"}}, "404 Not Found")
                    continue
                watch = asyncio.create_task(_watch(reader, exchange.gone))
                with suppress(ConnectionError):
                    await behaviour(exchange)
                watch.cancel()
                with suppress(asyncio.CancelledError):
                    await watch
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            open_writers.discard(writer)
            writer.close()
            tasks.discard(task)

    if socket:
        server = await asyncio.start_unix_server(serve, socket)
        stub.address = f"unix://{socket}"
    else:
        server = await asyncio.start_server(serve, host, 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        stub.address = f"http{'s' if tls else ''}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    try:
        yield stub
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode().strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Exchange(method, path, headers, body, writer, asyncio.Event())


async def _watch(reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
    """The client sends nothing while it is answered: what can be read then is the end of its connection."""
    with suppress(ConnectionError):
        while not reader.at_eof():
            if not await _peek(reader):
                break
    gone.set()


async def _peek(reader: asyncio.StreamReader) -> bool:
    await reader._wait_for_data("watch")  # type: ignore[attr-defined]
    return not reader.at_eof()
