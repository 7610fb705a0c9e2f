"""Sequences in the order in which they may run: priority, then arrival. The scheduler's running set and waiting line."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from ryzanstein.worker.engine.sequence import Sequence

_by_order = attrgetter("order")


class OrderedSequences:
    """A sorted list. Some hundred entries at most: shifting pointers is cheaper than a tree or lazy deletion."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, i: int) -> Sequence:
        return self._items[i]

    def __contains__(self, sequence: Sequence) -> bool:
        i = bisect_left(self._items, sequence.order, key=_by_order)
        return i < len(self._items) and self._items[i] is sequence

    @property
    def first(self) -> Sequence | None:
        return self._items[0] if self._items else None

    @property
    def last(self) -> Sequence | None:
        return self._items[-1] if self._items else None

    def insert(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        """`sequence` must be in it."""
        del self._items[bisect_left(self._items, sequence.order, key=_by_order)]
