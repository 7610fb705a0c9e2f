"""Request bodies that are arriving: each bounded in bytes and time, all together in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from ryzanstein.router.faces.http.room import Room
from ryzanstein.router.faces.openai.answers.failures import MALFORMED, MEMORY, TIMEOUT, TOO_LARGE, HttpFailure, HttpRefused


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """The bounds of one body: its bytes, and the seconds until it is complete."""

    max_bytes: int
    timeout_s: float


class BodyArrival:
    """One request's `receive`, with bounds.

    Leave the context when the request is over: it then releases the memory that it still holds.
    """

    def __init__(self, receive: Receive, headers: Headers, bounds: BodyBounds, room: Room) -> None:
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
