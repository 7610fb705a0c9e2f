"""Orders of nodes that are computed no further than they are read.

A request needs its node and one to fall back to. The first nodes of a key are remembered, because a
conversation has the same key at each turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

HEAD = 4
"""The nodes of a key that are remembered: its own, its backup, and two where these are away or have failed."""


class LazyOrder(Sequence[str]):
    """Node ids from an iterator, each read once, when it is asked for."""

    def __init__(self, node_ids: Iterator[str]) -> None:
        self._left = node_ids
        self._read: list[str] = []

    def __bool__(self) -> bool:
        return self._reaches(0)

    def __len__(self) -> int:
        self._read.extend(self._left)
        return len(self._read)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...

    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, slice) or at < 0 or not self._reaches(at):
            self._read.extend(self._left)
        return self._read[at]

    def _reaches(self, at: int) -> bool:
        while len(self._read) <= at:
            node_id = next(self._left, None)
            if node_id is None:
                return False
            self._read.append(node_id)
        return True


class RecentOrders:
    """Orders of recently asked keys. Above `max_entries` it forgets those that were not asked for longest.

    A key has a version of the nodes in it, so that what is remembered of an earlier version is not found
    any more.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._orders: OrderedDict[Hashable, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    def find(self, key: Hashable) -> tuple[str, ...] | None:
        order = self._orders.get(key)
        if order is not None:
            self._orders.move_to_end(key)
        return order

    def put(self, key: Hashable, order: tuple[str, ...]) -> None:
        self._orders[key] = order
        if len(self._orders) > self._max_entries:
            self._orders.popitem(last=False)


@dataclass(frozen=True, slots=True)
class OrderMemory:
    """What a router remembers of keys, of all models together."""

    heads: RecentOrders = field(default_factory=partial(RecentOrders, 65_536))
    """The first nodes of each: about 300 bytes a key, 20 MB in all."""
    whole: RecentOrders = field(default_factory=partial(RecentOrders, 64))
    """All nodes of those whose first ones did not suffice: 8 bytes a node."""
