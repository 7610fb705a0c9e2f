"""The position of an event stream's reader: each event's `id:`, returned as `Last-Event-ID`.

For each choice that has begun it has the index of the next token, `choice:index`, followed by a `.`
when the choice has ended. Commas separate the choices: `0:12,1:9.` has 12 tokens of choice 0 and
all 9 of choice 1.
"""

from __future__ import annotations

import re

from ryzanstein import errors
from ryzanstein.generation.sampling import MAX_CHOICES

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
