"""Bodies on their way: requests that arrive, and large answers that leave as the client reads.

Each is bounded in bytes and time, all together in memory. Messages on sockets share the memory of those that arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from ryzanstein.router.faces.openai.answers.failures import MALFORMED, MEMORY, TIMEOUT, TOO_LARGE, HttpFailure, HttpRefused


@dataclass(slots=True)
class ByteBudget:
    """The memory for all bodies that arrive, or for all that leave. `taken` and `bound` are in bytes."""

    bound: int
    taken: int = 0


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """The bounds of one body: its bytes, and the seconds until it is complete."""

    max_bytes: int
    timeout_s: float


class BodyArrival:
    """One request's `receive`, with bounds.

    Leave the context when the request is over: it then releases the memory that it still holds.
    """

    def __init__(self, receive: Receive, headers: Headers, bounds: BodyBounds, room: ByteBudget) -> None:
        self._receive = receive
        self._headers = headers
        self._bounds = bounds
        self._room = room
        self._until = asyncio.get_running_loop().time() + bounds.timeout_s
        self._begun = self._complete = False
        self._num_bytes = self._held_bytes = 0

    def __enter__(self) -> BodyArrival:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._give_back()

    async def receive(self) -> Message:
        """Returns the next message.

        The first call refuses a body by its headers. Each call refuses it for a bound that it
        breaks as it arrives.
        """
        if self._complete:
            self._give_back()  # a further receive means that the body has been consumed
            return await self._receive()
        if not self._begun:
            self._begun = True
            self._check_headers()
        message = await self._next()
        self._complete = not message.get("more_body", False)
        self._take(len(message.get("body", b"")))
        return message

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._receive()
        except TimeoutError:
            message = f"the body was not complete within {self._bounds.timeout_s:g} s"
            raise HttpRefused(HttpFailure(408, message, "body", "request_timeout", {"Connection": "close"}), TIMEOUT) from None

    def _check_headers(self) -> None:
        length = self._headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._bounds.max_bytes:
            raise self._too_large()
        if (encoding := self._headers.get("content-encoding", "identity").lower()) != "identity":
            message = f"Content-Encoding: must be identity, got {encoding[:64]!r}"
            raise HttpRefused(HttpFailure(415, message, "Content-Encoding", "unsupported_encoding"), MALFORMED)

    def _take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._bounds.max_bytes:
            raise self._too_large()
        self._held_bytes += num_bytes
        self._room.taken += num_bytes
        if self._room.taken > self._room.bound:
            message = f"too many bodies are being read: the bound is {self._room.bound} bytes in total"
            raise HttpRefused(HttpFailure(503, message, None, "too_many_bodies", {"Retry-After": "1"}), MEMORY)

    def _give_back(self) -> None:
        self._room.taken -= self._held_bytes
        self._held_bytes = 0

    def _too_large(self) -> HttpRefused:
        message = f"the body has more than {self._bounds.max_bytes} bytes"
        return HttpRefused(HttpFailure(413, message, "body", "body_too_large"), TOO_LARGE)


LARGE_BYTES = 2**16
"""An answer of more bytes takes room. Smaller ones fit into what a connection buffers anyway."""
_PIECE_BYTES = 2**16


class Departure:
    """One request's `send`, with bounds.

    A large answer takes room until the client has read it, or takes longer than `timeout_s` for a
    piece. Without room it is replaced by a refusal. An answer that is alone is never refused.
    """

    def __init__(
        self, send: Send, refuse: Callable[[HttpRefused], Awaitable[None]], room: ByteBudget, timeout_s: float
    ) -> None:
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
