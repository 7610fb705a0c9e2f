"""The bounds of the WebSocket face, the credit of a stream, and why a socket is closed.

The codes are those of RFC 6455 (7.4.1), and private ones from 4000 on. docs/build/websocket.md has the table; a test
compares both.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum


class CloseCode(IntEnum):
    """The codes that this router sends, besides echoing the client's own."""

    PROTOCOL_ERROR = 1002
    """What came is not RFC 6455."""
    UNSUPPORTED_DATA = 1003
    """A binary message: every message is JSON in a text message."""
    INVALID_DATA = 1007
    """A message is not UTF-8."""
    POLICY_VIOLATION = 1008
    """Too many messages that are no valid request, too many frames, or a message in too many fragments."""
    MESSAGE_TOO_BIG = 1009
    """A message is larger than the bound."""
    INTERNAL_ERROR = 1011
    """A bug of ours."""
    SERVICE_RESTART = 1012
    """The router stops: attach at another one."""
    TRY_AGAIN_LATER = 1013
    """The messages that are arriving at this router take too much memory."""
    IDLE = 4000
    """No stream and no message for the idle time."""
    SILENT = 4001
    """Nothing from the client, not even a pong."""
    NOT_READING = 4002
    """The client takes no byte."""
    KEY_ENDED = 4009
    """The key was revoked or has expired."""
    MESSAGE_TIMEOUT = 4008
    """A message was not complete in time."""


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Bounds per socket, except where another scope is named. Times are in seconds."""

    max_sockets: int = 1024
    """Of a router."""
    max_streams: int = 128
    """Generations that are submitted or attached to and have not ended."""
    max_message_bytes: int = 4 * 2**20
    max_fragments: int = 512
    """Of a message."""
    max_arriving_bytes: int = 64 * 2**20
    """Of messages that are arriving or wait to be read, on all sockets of a router."""
    message_timeout_s: float = 30.0
    """From the first byte of a message to its last."""
    max_messages: int = 2048
    """Of a chat."""
    frames_per_s: float = 500.0
    frame_burst: int = 1000
    """Frames beyond this rate wait: the socket is not read meanwhile."""
    flood_s: float = 5.0
    """After which a socket that is always beyond its rate is closed."""
    max_mistakes: int = 32
    """Messages that are no valid request, before the socket is closed; a socket regains one per second."""
    ping_s: float = 20.0
    silence_s: float = 40.0
    """Without a byte from the client, not even a pong."""
    idle_s: float = 300.0
    """Without a stream and without a message."""
    unread_s: float = 2.0
    """Without credit, or without room in the socket, after which a stream counts as unread."""
    give_up_s: float = 60.0
    """After which a stream without credit ends, and a socket that takes no byte is closed."""
    origins: frozenset[str] = frozenset()
    """Origins of web pages that may connect; "*" is any. A client that is no browser sends none."""


MAX_CREDIT = 1_000_000


class Credit:
    """The chunks that may still be sent. None is no bound."""

    def __init__(self, chunks: int | None) -> None:
        self._chunks = chunks
        self._given = asyncio.Event()

    @property
    def available(self) -> bool:
        return self._chunks is None or self._chunks > 0

    def give(self, chunks: int) -> None:
        """Adds credit. Beyond MAX_CREDIT it is not counted; without a bound nothing is."""
        if self._chunks is not None:
            self._chunks = min(MAX_CREDIT, self._chunks + chunks)
            self._given.set()

    def spend(self) -> None:
        if self._chunks is not None:
            self._chunks -= 1

    async def wait(self) -> None:
        """Returns when there is credit."""
        while not self.available:
            self._given.clear()
            await self._given.wait()
