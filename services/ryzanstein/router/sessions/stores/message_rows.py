"""How stores keep a message: as two texts, its role and its content.

A message with more parts than these has the kind `message` in place of its role, and itself as JSON
in place of its content. So stores of earlier versions are read as they are. A router of an earlier
version that shares a store reads what it knows, and fails on a session with other messages rather
than answer without a part of them. For that reason what a session continues is its first row, of the
kind `continues`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ryzanstein import errors
from ryzanstein.generation.prompts import Message, Role

CONTINUES = "continues"
_WHOLE = "message"
_decoder = msgspec.json.Decoder(Message)


def row_of(message: Message) -> tuple[str, str]:
    if message.is_plain:
        return message.role.value, message.content
    return _WHOLE, msgspec.json.encode(message).decode()


def message_of(kind: str, content: str) -> Message:
    """Returns the message of a row. Raises ValueError for one that only a later version can read."""
    return _decoder.decode(content) if kind == _WHOLE else Message(Role(kind), content)


def rows_of(parent: str, messages: Iterable[Message]) -> list[tuple[str, str]]:
    """Returns the rows of a session that continues `parent`, if that is not empty."""
    rows = [row_of(message) for message in messages]
    return [(CONTINUES, parent), *rows] if parent else rows


def read_rows(rows: Sequence[tuple[str, str]]) -> tuple[str, tuple[Message, ...]]:
    """Returns what a session continues, and its messages."""
    continues = bool(rows) and rows[0][0] == CONTINUES
    parent = rows[0][1] if continues else ""
    return parent, tuple(message_of(*row) for row in rows[continues:])


@contextlib.contextmanager
def readable(session_id: str) -> Iterator[None]:
    """Raises FAILED_PRECONDITION SESSION_DAMAGED for a message that cannot be read."""
    try:
        yield
    except (ValueError, TypeError) as error:
        what = f"session {session_id[:128]!r} has a message that is damaged or of a later version: delete the session"
        raise errors.failed_precondition("SESSION_DAMAGED", what) from error
