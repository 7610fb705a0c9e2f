"""The bounds of the WebSocket face."""

from __future__ import annotations

from dataclasses import dataclass


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
