"""Sequences in a fixed order: a tenant's queue, and the running sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ryzanstein.worker.engine.sequence import Sequence


class OrderedSequences:
    """A list sorted by an attribute that is unique and constant while the sequence is in the list.

    It has some hundred entries at most: shifting pointers is cheaper than a tree or lazy deletion.
    """

    def __init__(self, attribute: str) -> None:
        self._items: list[Sequence] = []
        self._key: Any = attrgetter(attribute)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, i: int) -> Sequence:
        return self._items[i]

    def __contains__(self, sequence: Sequence) -> bool:
        i = bisect_left(self._items, self._key(sequence), key=self._key)
        return i < len(self._items) and self._items[i] is sequence

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def insert(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, which must be in the list."""
        del self._items[bisect_left(self._items, self._key(sequence), key=self._key)]
