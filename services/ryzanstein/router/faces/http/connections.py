"""How many connections there are and how long each may take: the bounds, and who is counted against them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_MAX_GOODBYES = 64


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Of one HTTP server. Seconds and counts; `max_head_bytes` is the request line with all headers."""

    max_connections: int = 2048
    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    max_head_bytes: int = 65_536
    max_headers: int = 128


class Connections:
    """Those of one server. One that has no request under way gives its room to a new one; a running stream never does.

    `on_refused` is told why a connection or what came over it was refused.
    """

    def __init__(self, bounds: ConnectionBounds, on_refused: Callable[[str], object]) -> None:
        self.bounds = bounds
        self.on_refused = on_refused
        self._open: set[asyncio.BaseTransport] = set()
        # In the order in which they became idle.
        self._idle: dict[asyncio.BaseTransport, None] = {}
        self._goodbyes: set[asyncio.BaseTransport] = set()

    def opened(self, transport: asyncio.BaseTransport) -> bool:
        """Counts one more. False: there is no room for it."""
        if len(self._open) >= self.bounds.max_connections and self._idle:
            oldest = next(iter(self._idle))
            self.closed(oldest)
            oldest.close()
        if len(self._open) >= self.bounds.max_connections:
            return False
        self._open.add(transport)
        return True

    def may_answer(self, transport: asyncio.BaseTransport) -> bool:
        """Whether one without room gets an answer. Only so many are answered at once; the others find out by themselves."""
        if len(self._goodbyes) >= _MAX_GOODBYES:
            return False
        self._goodbyes.add(transport)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Twice is once."""
        self._idle.pop(transport, None)
        self._open.discard(transport)
        self._goodbyes.discard(transport)

    def idle(self, transport: asyncio.BaseTransport) -> None:
        if transport in self._open:
            self._idle[transport] = None

    def busy(self, transport: asyncio.BaseTransport) -> None:
        self._idle.pop(transport, None)
