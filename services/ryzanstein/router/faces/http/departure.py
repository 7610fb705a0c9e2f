"""Large answers that are leaving: written piece by piece as the client reads, all together bounded in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Message, Send

from ryzanstein.router.faces.http.room import Room
from ryzanstein.router.faces.openai.answers.failures import MEMORY, HttpFailure, HttpRefused

LARGE_BYTES = 2**16
"""An answer of more bytes takes room. Smaller ones fit into what a connection buffers anyway."""
_PIECE_BYTES = 2**16


class Departure:
    """One request's `send`, with bounds.

    A large answer takes room until the client has read it, or takes longer than `timeout_s` for a
    piece. Without room it is replaced by a refusal. An answer that is alone is never refused.
    """

    def __init__(self, send: Send, refuse: Callable[[HttpRefused], Awaitable[None]], room: Room, timeout_s: float) -> None:
        self._send = send
        self._refuse = refuse
        self._room = room
        self._timeout_s = timeout_s
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        """Sends a message of the response. Raises TimeoutError when the client is too slow."""
        if message["type"] == "http.response.start" and _num_bytes(message) > LARGE_BYTES:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            start, self._start = self._start, None
            await self._send_large(start, message)

    async def _send_large(self, start: Message, message: Message) -> None:
        body = message.get("body", b"")
        if self._room.taken and self._room.taken + len(body) > self._room.bound:
            text = f"too many answers wait for their readers: the bound is {self._room.bound} bytes in total"
            await self._refuse(HttpRefused(HttpFailure(503, text, None, "too_many_answers", {"Retry-After": "1"}), MEMORY))
            return
        self._room.taken += len(body)
        try:
            await self._send(start)
            for begin in range(0, len(body), _PIECE_BYTES):
                async with asyncio.timeout(self._timeout_s):
                    await self._send({**message, "body": body[begin : begin + _PIECE_BYTES], "more_body": True})
            async with asyncio.timeout(self._timeout_s):
                await self._send({**message, "body": b""})
        finally:
            self._room.taken -= len(body)


def _num_bytes(start: Message) -> int:
    """Returns the size of a whole answer; 0 for a stream."""
    return int(Headers(raw=start["headers"]).get("content-length", "0"))
