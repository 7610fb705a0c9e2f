"""Sockets take turns at being parsed: one piece of each after the other, and all of them for a bounded time.

A client's frames cost the router more than they cost the client. So that many sockets that each keep
to their bounds do not together keep the event loop from everything else, what does not fit into one
turn of the loop waits for the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

_TURN_S = 0.001


class ParsingTurns:
    """The sockets of a router that have something to parse."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._turn: asyncio.Handle | None = None

    def wait(self, step: Callable[[], None]) -> None:
        """Calls `step` once when its turn comes. A socket that has more to parse waits again, behind the others."""
        self._waiting.append(step)
        self._begin()

    def _begin(self) -> None:
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        self._turn = None
        until = time.perf_counter() + _TURN_S  # the loop's own clock stands during a turn
        try:
            while self._waiting:
                self._waiting.popleft()()
                if time.perf_counter() >= until:
                    break
        finally:
            if self._waiting:
                self._begin()
