"""Callers that stay: whoever may no longer be in is shown out, on every face.

A stream or socket was let in once. Its key may be revoked or expire meanwhile, so each caller that
stays is asked about twice a second, from memory.
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
    """The callers that stay. `ended` says why one must leave."""

    def __init__(self, ended: Callable[[Caller], RyzansteinError | None], registry: CollectorRegistry) -> None:
        self._ended = ended
        self._ends: dict[Caller, set[_End]] = {}
        self.shown_out = Counter(
            "ryzanstein_router_streams_ended_total",
            "Streams, sockets and generations that ended because their key did, by reason",
            ("cause",),
            registry=registry,
        )

    def enter(self, caller: Caller, end: _End) -> Callable[[], None]:
        """Calls `end` with the reason when the caller must leave. Call what this returns when the caller has left."""
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
        """Shows out who must leave."""
        for caller in list(self._ends):
            if (error := self._ended(caller)) is not None:
                for end in self._ends.pop(caller):
                    self.shown_out.labels(error.reason.lower()).inc()
                    end(error)

    async def while_in(self, caller: Caller, events: AsyncGenerator[_Event, None]) -> AsyncGenerator[_Event, None]:
        """Yields the events, and closes them. Raises the reason when the caller must leave, also while there is no event."""
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
