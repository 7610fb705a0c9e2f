"""Why this router closes a socket: codes of RFC 6455 (7.4.1), and private ones from 4000 on.

docs/websocket.md has the table; a test compares both.
"""

from __future__ import annotations

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
    MESSAGE_TIMEOUT = 4008
    """A message was not complete in time."""
