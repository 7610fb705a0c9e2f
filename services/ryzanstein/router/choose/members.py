"""The nodes of one model, kept by events, so that a choice looks at a few of them and not at all.

A load, which changes with each beat, changes sums. Which nodes there are and their capacities, which
seldom change, make a new version and new orders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from heapq import nlargest
from typing import Self

from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.order import HEAD, Heads
from ryzanstein.router.choose.rendezvous import scaled, weights


class NodeGroup:
    """Nodes that are ranked among themselves: the regular ones of a model, or its reserve.

    `views` are all of them, `wanted` those that would be usable if their breakers let requests through,
    `sequences` and `relative_loads` those of the usable ones.
    """

    def __init__(self, heads: Heads) -> None:
        self.views: dict[str, NodeView] = {}
        self.wanted: set[str] = set()
        self.sequences: dict[str, int] = {}
        self.relative_loads: dict[str, float] = {}
        self.version = object()
        """Another one after each change of the nodes or their capacities."""
        self._heads = heads
        self._num_sequences = self._num_capacity = 0
        # Made when they are asked for after a change.
        self._able: frozenset[str] | None = None
        self._able_by_name: tuple[str, ...] | None = None
        self._names: tuple[bytes, ...] | None = None

    def put(self, view: NodeView) -> None:
        """Adds a node, or replaces what was known of it."""
        node_id, usable = view.node_id, view.usable
        before, was_usable = self.views.get(node_id), node_id in self.sequences
        self.views[node_id] = view
        if before is None or before.capacity != view.capacity:
            self._renew()
        if before is not None and was_usable:
            self._discount(before)
        if usable:
            self._count(view)
        if usable is not was_usable:
            self._able = self._able_by_name = None
        (self.wanted.add if view.wanted else self.wanted.discard)(node_id)

    def remove(self, node_id: str) -> None:
        """Removes a node, if it is there."""
        before = self.views.pop(node_id, None)
        if before is not None:
            self._renew()
            self.wanted.discard(node_id)
            if node_id in self.sequences:
                self._discount(before)
                self._able = self._able_by_name = None

    @property
    def able(self) -> frozenset[str]:
        """The usable nodes. The same object as long as they are the same."""
        if self._able is None:
            self._able = frozenset(self.sequences)
        return self._able

    @property
    def able_by_name(self) -> tuple[str, ...]:
        """The usable nodes in the order of their names."""
        if self._able_by_name is None:
            self._able_by_name = tuple(sorted(self.sequences))
        return self._able_by_name

    @property
    def usable(self) -> list[NodeView]:
        """The usable nodes, in the order in which they came."""
        return [view for view in self.views.values() if view.node_id in self.sequences]

    def able_but(self, excluded: Collection[str]) -> frozenset[str]:
        """Returns the usable nodes that are not excluded."""
        return self.able if self.able.isdisjoint(excluded) else self.able.difference(excluded)

    def num_sequences(self, node_ids: Set[str]) -> int:
        """Returns the sequences of these usable nodes."""
        return self._num_sequences if node_ids is self._able else sum(map(self.sequences.__getitem__, node_ids))

    def num_capacity(self, node_ids: Set[str]) -> int:
        """Returns the capacity of these usable nodes."""
        return self._num_capacity if node_ids is self._able else sum(self.views[node_id].capacity for node_id in node_ids)

    def order(self, key: bytes, node_ids: Collection[str], *, weighted: bool = False) -> Iterator[str]:
        """Yields these of the nodes in the key's order; `weighted`: each node has keys in proportion to its capacity.

        Nodes that leave while the order is read are left out beyond the first ones.
        """
        head = self._head(key, weighted)
        yield from (node_id for node_id in head if node_id in node_ids)
        if len(head) == HEAD:
            rest = [node_id for node_id in node_ids if node_id in self.views and node_id not in head]
            scores = self._scores(key, rest, map(str.encode, rest), weighted)
            yield from (node_id for _, node_id in sorted(zip(scores, rest, strict=True), reverse=True))

    def _head(self, key: bytes, weighted: bool) -> tuple[str, ...]:
        """Returns the first nodes of all."""
        head = self._heads.find((self.version, key, weighted))
        if head is None:
            if self._names is None:
                self._names = tuple(map(str.encode, self.views))
            scores = self._scores(key, self.views, self._names, weighted)
            head = tuple(node_id for _, node_id in nlargest(HEAD, zip(scores, self.views, strict=True)))
            self._heads.put((self.version, key, weighted), head)
        return head

    def _scores(
        self, key: bytes, node_ids: Iterable[str], names: Iterable[bytes], weighted: bool
    ) -> Sequence[bytes] | Sequence[float]:
        plain = weights(key, names)
        if not weighted:
            return plain
        capacities = (self.views[node_id].capacity for node_id in node_ids)
        return [scaled(int.from_bytes(each, "big"), capacity) for each, capacity in zip(plain, capacities, strict=True)]

    def _renew(self) -> None:
        self.version, self._names = object(), None

    def _count(self, view: NodeView) -> None:
        self.sequences[view.node_id] = view.sequences
        self.relative_loads[view.node_id] = view.relative_load
        self._num_sequences += view.sequences
        self._num_capacity += view.capacity

    def _discount(self, view: NodeView) -> None:
        del self.sequences[view.node_id], self.relative_loads[view.node_id]
        self._num_sequences -= view.sequences
        self._num_capacity -= view.capacity


class Members:
    """All nodes of one model. A change of one costs the same however many there are."""

    def __init__(self, heads: Heads | None = None) -> None:
        heads = Heads() if heads is None else heads
        self._regular, self._reserve, self._none = NodeGroup(heads), NodeGroup(heads), NodeGroup(heads)

    @classmethod
    def of(cls, views: Iterable[NodeView]) -> Self:
        """Returns the members that these nodes are."""
        members = cls()
        for view in views:
            members.put(view)
        return members

    def __bool__(self) -> bool:
        return bool(self._regular.views or self._reserve.views)

    @property
    def divided(self) -> tuple[NodeGroup, NodeGroup]:
        """The regular nodes and the reserve. Where all are of the reserve, none is."""
        return (self._regular, self._reserve) if self._regular.views else (self._reserve, self._none)

    def put(self, view: NodeView) -> None:
        """Adds a node, or replaces what was known of it."""
        (self._regular if view.reserve else self._reserve).remove(view.node_id)
        (self._reserve if view.reserve else self._regular).put(view)

    def remove(self, node_id: str) -> None:
        """Removes a node, if it is there."""
        self._regular.remove(node_id)
        self._reserve.remove(node_id)
