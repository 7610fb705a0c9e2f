from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.router.faces.http.conftest import EchoCore
from tests.router.faces.websocket.asyncapi import checked
from websockets.asyncio.client import ClientConnection, connect

from ryzanstein.router.access.authenticator import Anonymous
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.faces.http.app import create_app
from ryzanstein.router.faces.http.serving.server import HttpServer
from ryzanstein.router.faces.websocket.face import WebSocketFace
from ryzanstein.router.faces.websocket.limits import SocketLimits
from ryzanstein.router.telemetry import RouterTelemetry

SUBPROTOCOL = "ryzanstein.v1"
CHAT = "/v1/chat/completions"


@dataclass
class SocketClient:
    """A client of the subprotocol on somebody else's WebSocket library."""

    socket: ClientConnection
    frames: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def submit(self, stream_id: str, text: str = "one two three", *, url: str = CHAT, **fields: Any) -> None:
        body = {"messages": [{"role": "user", "content": text}], **fields.pop("body", {})}
        await self.send("submit", id=stream_id, url=url, body=body, **fields)

    async def receive(self) -> dict[str, Any]:
        frame = checked(json.loads(await asyncio.wait_for(self.socket.recv(), 20)))
        self.frames.append(frame)
        return frame

    async def until(self, kind: str, stream_id: str | None = None) -> dict[str, Any]:
        """Reads to the next frame of this kind, of this stream."""
        while (frame := await self.receive())["type"] != kind or (stream_id is not None and frame.get("id") != stream_id):
            pass
        return frame

    async def quiet(self, seconds: float = 0.2) -> list[dict[str, Any]]:
        """Everything that arrives until nothing does for a while."""
        frames = []
        while True:
            try:
                frames.append(checked(json.loads(await asyncio.wait_for(self.socket.recv(), seconds))))
            except TimeoutError:
                self.frames += frames
                return frames

    async def closed(self) -> tuple[int, str]:
        """Reads to the end; the server's close code and reason."""
        await asyncio.wait_for(self.socket.wait_closed(), 20)
        return self.socket.close_code or 0, self.socket.close_reason or ""

    def chunks(self, stream_id: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["type"] == "chunk" and frame["id"] == stream_id]

    def text(self, stream_id: str, choice: int = 0) -> str:
        chosen = (frame["chunk"]["choices"][0] for frame in self.chunks(stream_id) if frame["choice"] == choice)
        return "".join(delta["delta"].get("content", "") for delta in chosen)


@dataclass
class SocketServer:
    """The face behind a real server on loopback."""

    core: EchoCore
    telemetry: RouterTelemetry
    server: HttpServer

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}/v1/ws"

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(f"ryzanstein_router_{name}", labels) or 0.0

    def connect(self, **options: Any) -> connect:
        return connect(self.url, **{"subprotocols": [SUBPROTOCOL], "max_size": None, "proxy": None, **options})


@pytest.fixture
def limits() -> SocketLimits:
    return SocketLimits()


@pytest.fixture
async def face(limits: SocketLimits) -> AsyncIterator[SocketServer]:
    core, telemetry = EchoCore(), RouterTelemetry()
    entrance = Entrance(Anonymous(), telemetry.registry)
    app, sockets = create_app(core, telemetry, entrance), WebSocketFace(core, telemetry, entrance, limits)
    refused = telemetry.http_refused
    server = HttpServer(app, "127.0.0.1", 0, on_refused=lambda reason: refused.labels(reason).inc(), upgrades=sockets)
    await server.start()
    yield SocketServer(core, telemetry, server)
    await core.close()
    await server.stop(1)


@pytest.fixture
async def client(face: SocketServer) -> AsyncIterator[SocketClient]:
    async with face.connect() as socket:
        yield SocketClient(socket)


@pytest.fixture
def eventually() -> Callable[..., object]:
    async def wait(condition: Callable[[], object], what: str) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert condition(), what

    return wait
