"""Ends streams and sockets whose key was revoked or has expired since they began.

The keys of all open streams and sockets are checked twice a second, from memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter

from ryzanstein.auth.caller import Caller
from ryzanstein.errors import RyzansteinError

LOOK_S = 0.5
_Event = TypeVar("_Event")
_End = Callable[[RyzansteinError], None]


class LiveCallers:
    """The callers with open streams and sockets. `ended` returns why a caller would be refused now."""

    def __init__(self, ended: Callable[[Caller], RyzansteinError | None], registry: CollectorRegistry) -> None:
        self._ended = ended
        self._ends: dict[Caller, set[_End]] = {}
        self._num_ended = Counter(
            "ryzanstein_router_streams_ended_total",
            "Streams and sockets that ended because their key did, by reason",
            ("cause",),
            registry=registry,
        )

    def enter(self, caller: Caller, end: _End) -> Callable[[], None]:
        """Calls `end` with the reason when the key ends. Call the returned function when the stream or socket is closed."""
        if not caller.key_id:
            return _nothing
        self._ends.setdefault(caller, set()).add(end)

        def leave() -> None:
            ends = self._ends.get(caller, set())
            ends.discard(end)
            if not ends:
                self._ends.pop(caller, None)

        return leave

    def look(self) -> None:
        """Ends the streams and sockets of every caller that would be refused now."""
        for caller in list(self._ends):
            if (error := self._ended(caller)) is not None:
                for end in self._ends.pop(caller):
                    self._num_ended.labels(error.reason.lower()).inc()
                    end(error)

    async def while_in(self, caller: Caller, events: AsyncGenerator[_Event, None]) -> AsyncGenerator[_Event, None]:
        """Yields the events, and closes them. Raises the reason when the key ends, also while there is no event."""
        if not caller.key_id:
            async with aclosing(events):
                async for event in events:
                    yield event
            return
        out: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leave = self.enter(caller, lambda error: None if out.done() else out.set_exception(error))
        following: asyncio.Future[_Event] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(events))
                either: set[asyncio.Future[Any]] = {following, out}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if out.done():
                    out.result()
                try:
                    event = following.result()
                except StopAsyncIteration:
                    return
                yield event
        finally:
            leave()
            if following is not None and not following.done():
                following.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await following
            if out.done():
                out.exception()
            out.cancel()
            await events.aclose()


def _nothing() -> None:
    pass
