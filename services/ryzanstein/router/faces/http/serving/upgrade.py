"""What the HTTP server hands over when a connection leaves HTTP/1.1 for another protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from uvicorn.server import ServerState


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """A request to upgrade a connection.

    `closed` must be called when the connection is lost. `server` has the connections that the
    server notifies when it stops (`shutdown()`), and the tasks that it cancels after its grace.
    """

    target: str
    headers: Sequence[tuple[str, str]]
    transport: asyncio.Transport
    server: ServerState
    closed: Callable[[], None]


class SocketUpgrades(Protocol):
    """Takes connections over."""

    path: str

    def upgraded(self, request: UpgradeRequest) -> asyncio.Protocol:
        """Returns the protocol that goes on with the connection. Raises HttpRefused."""
        ...
