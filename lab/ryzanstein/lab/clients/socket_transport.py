"""A client over WebSocket: submit, and attach for what is missing, on one socket while it lasts.

As over HTTP, chunks carry no token ids and no node, but where their reader stands.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

from ryzanstein.addresses import join_address
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.clients.http_transport import CODES, chat_body, take_choice
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.transport import Request, RouterAddress

_SUBPROTOCOL = Subprotocol("ryzanstein.v1")
_CONNECT_S = 2.0
_CREDIT = 32
"""Chunks that a stream may be ahead: the flow control is part of what is struck."""


class SocketTransport:
    """A client's socket.

    A stream that breaks off closes it, so that nothing of an old stream is taken for a new one.
    """

    def __init__(self, routers: Sequence[RouterAddress]) -> None:
        self._routers = routers
        self._socket: ClientConnection | None = None
        self._router = -1
        self._ids = map(str, count())
        self._ended: set[int] = set()

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """See `Transport.follow`."""
        try:
            async with asyncio.timeout(request.question.call_s):
                socket = await self._open(reading.router)
                await self._read(socket, await self._begin(socket, request, reading), reading, progress)
        except (OSError, TimeoutError, WebSocketException) as error:
            await self.leave()
            raise RyzansteinError(str(error), Code.UNAVAILABLE, Code.UNAVAILABLE.name) from None
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """See `Transport.leave`."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def _open(self, router: int) -> ClientConnection:
        if router != self._router:
            await self.leave()
        if self._socket is None:
            address = self._routers[router]
            scheme = "wss" if address.roots else "ws"
            url = f"{scheme}://{join_address(address.http_host, address.http_port)}/v1/ws"
            self._socket = await connect(
                url,
                subprotocols=[_SUBPROTOCOL],
                additional_headers=address.credential,
                ssl=address.tls,
                open_timeout=_CONNECT_S,
                max_size=None,
                proxy=None,
            )
            self._router = router
        return self._socket

    async def _begin(self, socket: ClientConnection, request: Request, reading: AnswerReading) -> str:
        stream_id = next(self._ids)
        if reading.generation_id:
            what: dict[str, Any] = {
                "type": "attach",
                "generation": reading.generation_id,
                "from_index": {str(choice): index for choice, index in reading.next_index.items()},
                "ended": sorted(self._ended),
                "include_usage": True,
            }
        else:
            self._ended.clear()
            body = chat_body(request)
            what = {"type": "submit", "url": "/v1/chat/completions", "body": body}
        await socket.send(json.dumps({**what, "id": stream_id, "credit": _CREDIT}))
        return stream_id

    async def _read(
        self, socket: ClientConnection, stream_id: str, reading: AnswerReading, progress: Callable[[], None]
    ) -> None:
        async for text in socket:
            frame = json.loads(text)
            if frame.get("id") != stream_id:
                continue  # of the socket as a whole: the router drains
            match frame["type"]:
                case "accepted" | "started":
                    reading.generation_id = frame["generation"]
                    reading.node_id = frame.get("node", "") or reading.node_id
                case "chunk":
                    self._take(frame, reading)
                    progress()
                    await socket.send(json.dumps({"type": "credit", "id": stream_id, "chunks": 1}))
                case "done":
                    return
                case "error":
                    raise _error(frame)
        raise RyzansteinError("the socket closed", Code.UNAVAILABLE, Code.UNAVAILABLE.name)

    def _take(self, frame: Mapping[str, Any], reading: AnswerReading) -> None:
        if usage := frame["chunk"].get("usage"):
            reading.prompt_tokens = usage["prompt_tokens"]
            reading.completion_tokens = usage["completion_tokens"]
        if frame["ended"]:
            self._ended.add(frame["choice"])
        for choice in frame["chunk"]["choices"]:
            take_choice(choice, {frame["choice"]: frame["index"]}, reading)


def _error(frame: Mapping[str, Any]) -> RyzansteinError:
    code = CODES.get(frame["status"], Code.INTERNAL)
    reason = str(frame["error"].get("code") or code.name).upper()
    after_ms = frame.get("retry_after_ms")
    return RyzansteinError(frame["error"]["message"], code, reason, retry_after_s=after_ms / 1000 if after_ms else None)
