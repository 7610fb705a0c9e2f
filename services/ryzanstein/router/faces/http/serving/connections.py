"""Bounds the number of connections and how long each may take, and counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_MAX_GOODBYES = 64


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The bounds of one HTTP server, in seconds and counts.

    `max_head_bytes` covers the request line and all headers.
    """

    max_connections: int = 2048
    header_timeout_s: float = 10.0
    keep_alive_s: float = 75.0
    max_head_bytes: int = 65_536
    max_headers: int = 128


class Connections:
    """The connections of one server.

    A connection without a request in progress is closed to make room for a new one; a running
    stream never is. `on_refused` is called with the reason for which a connection or its input was
    refused.
    """

    def __init__(self, bounds: ConnectionBounds, on_refused: Callable[[str], object]) -> None:
        self.bounds = bounds
        self.on_refused = on_refused
        self._open: set[asyncio.BaseTransport] = set()
        # In the order in which they became idle.
        self._idle: dict[asyncio.BaseTransport, None] = {}
        self._goodbyes: set[asyncio.BaseTransport] = set()

    def opened(self, transport: asyncio.BaseTransport) -> bool:
        """Counts a new connection. Returns False when there is no room for it."""
        if len(self._open) >= self.bounds.max_connections and self._idle:
            oldest = next(iter(self._idle))
            self.closed(oldest)
            oldest.close()
        if len(self._open) >= self.bounds.max_connections:
            return False
        self._open.add(transport)
        return True

    def may_answer(self, transport: asyncio.BaseTransport) -> bool:
        """Returns whether a connection without room gets an answer.

        At most `_MAX_GOODBYES` are answered at once; the others are closed without an answer.
        """
        if len(self._goodbyes) >= _MAX_GOODBYES:
            return False
        self._goodbyes.add(transport)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Stops counting a connection. A second call has no effect."""
        self._idle.pop(transport, None)
        self._open.discard(transport)
        self._goodbyes.discard(transport)

    def idle(self, transport: asyncio.BaseTransport) -> None:
        if transport in self._open:
            self._idle[transport] = None

    def busy(self, transport: asyncio.BaseTransport) -> None:
        self._idle.pop(transport, None)
