"""The position of an event stream's reader: each event's `id:`, returned as `Last-Event-ID`.

It names the generation and, for each choice that has begun, the index of the next token: `GENERATION:CHOICE:INDEX`, followed
by a `.` when the choice has ended. Commas separate the choices: `0:12,1:9.` has 12 tokens of choice 0 and all 9 of choice 1.
Ids of earlier versions have no generation: where the path names it, they still say where to go on.
"""

from __future__ import annotations

import re

from ryzanstein import errors
from ryzanstein.generation.request import MAX_CHOICES

_FIELD = "Last-Event-ID"
_POSITION = re.compile(r"([0-9]{1,2}):([0-9]{1,9})(\.?)")


class Cursor:
    """A reader's position. It advances with the events that the reader is sent."""

    def __init__(self, next_index: dict[int, int] | None = None, ended: set[int] | None = None) -> None:
        self._next_index = next_index or {}
        self._ended = ended or set()

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Returns the position of a `Last-Event-ID`. An empty text is the beginning.

        Raises INVALID_ARGUMENT naming Last-Event-ID.
        """
        positions = [_POSITION.fullmatch(position) for position in text.split(",", MAX_CHOICES)] if text else []
        next_index, ended = {}, set()
        for position in positions:
            choice = int(position[1]) if position else MAX_CHOICES
            if position is None or choice >= MAX_CHOICES or choice in next_index:
                raise errors.invalid(_FIELD, "must be choice:index pairs as in an event's id", text[:64])
            next_index[choice] = int(position[2])
            if position[3]:
                ended.add(choice)
        return cls(next_index, ended)

    @property
    def from_index(self) -> dict[int, int]:
        """The first token wanted of each choice that has begun."""
        return dict(self._next_index)

    def began(self, choice: int) -> bool:
        return choice in self._next_index

    def ended(self, choice: int) -> bool:
        return choice in self._ended

    def advance(self, choice: int, next_index: int) -> None:
        self._next_index[choice] = next_index

    def begin(self, choice: int) -> None:
        self._next_index.setdefault(choice, 0)

    def end(self, choice: int) -> None:
        self.begin(choice)
        self._ended.add(choice)

    def __str__(self) -> str:
        ended = self._ended
        return ",".join([f"{choice}:{at}{'.' if choice in ended else ''}" for choice, at in sorted(self._next_index.items())])


LAST_EVENT_ID = "Last-Event-ID"
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,80}):(.*)", re.DOTALL)
_BARE = re.compile(r"[0-9]{1,2}:[0-9]+\.?(,.*)?", re.DOTALL)


def event_id(generation_id: str, cursor: Cursor) -> str:
    return f"{generation_id}:{cursor}"


def generation_of(last_event_id: str) -> str:
    """Returns the generation that an event's id names; empty for an id of an earlier version."""
    named = None if _BARE.fullmatch(last_event_id) else _NAMED.fullmatch(last_event_id)
    return named[1] if named else ""


def cursor_of(last_event_id: str, generation_id: str) -> Cursor:
    """Returns the position in this generation. An empty id is the beginning.

    Raises INVALID_ARGUMENT naming Last-Event-ID, also for the id of another generation's event.
    """
    named = generation_of(last_event_id)
    if named and named != generation_id:
        raise errors.invalid(LAST_EVENT_ID, f"must be of an event of generation {generation_id[:64]}", last_event_id[:64])
    return Cursor.parse(last_event_id.removeprefix(f"{named}:") if named else last_event_id)
