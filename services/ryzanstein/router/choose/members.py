"""The nodes of one model, kept by events, so that a choice looks at a few of them and not at all.

A load, which changes with each beat, changes sums. Which nodes there are and their capacities, which
seldom change, make a new version and new orders.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Generic, NamedTuple, Self, TypeVar

from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.rendezvous import scaled, weights

_HEAD = 4  # nodes of a key: its own, its backup, and two where these are away or have failed
_FEW = 8  # of so many nodes, one is scored for itself
_FOLLOWED = 64  # after more changes of the nodes, the first nodes of a key are computed from all nodes again

_Order = TypeVar("_Order")


class RecentOrders(Generic[_Order]):
    """Orders of recently asked keys. Above `max_entries` it forgets those that were not asked for longest."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._orders: OrderedDict[Hashable, _Order] = OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    def find(self, key: Hashable) -> _Order | None:
        order = self._orders.get(key)
        if order is not None:
            self._orders.move_to_end(key)
        return order

    def put(self, key: Hashable, order: _Order) -> None:
        self._orders[key] = order
        if len(self._orders) > self._max_entries:
            self._orders.popitem(last=False)


class FirstNodes(NamedTuple):
    """The first nodes of a key, after so many changes of its group."""

    num_changes: int
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderMemory:
    """What a router remembers of keys, of all models together."""

    heads: RecentOrders[FirstNodes] = field(default_factory=partial(RecentOrders[FirstNodes], 65_536))
    """The first nodes of each: about 400 bytes a key, 26 MB in all."""
    whole: RecentOrders[tuple[str, ...]] = field(default_factory=partial(RecentOrders[tuple[str, ...]], 64))
    """All nodes of those whose first ones did not suffice: 8 bytes a node. Their keys have the version of the nodes in them."""


class NodeGroup:
    """Nodes that are ranked among themselves: the regular ones of a model, or its reserve.

    `views` are all of them, `wanted` those that would be usable if their breakers let requests through,
    `sequences` and `relative_loads` those of the usable ones.
    """

    def __init__(self, memory: OrderMemory) -> None:
        self.views: dict[str, NodeView] = {}
        self.wanted: set[str] = set()
        self.sequences: dict[str, int] = {}
        self.relative_loads: dict[str, float] = {}
        self.version = object()
        """Another one after each change of the nodes or their capacities."""
        self._memory, self._identity = memory, object()
        self._num_changes, self._changed = 0, deque[str](maxlen=_FOLLOWED)
        """How often nodes came, went or got another capacity, and which ones last."""
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
            self._renew(node_id)
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
            self._renew(node_id)
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
        """Yields these of the nodes in the key's order; `weighted`: each node has keys in proportion to its capacity."""
        head = self._head(key, weighted)
        yield from (node_id for node_id in head if node_id in node_ids)
        if len(head) < _HEAD:
            return
        if len(node_ids) > len(self.views) // _FEW:
            # If the first nodes of a key are full, they are so for the next request with this key too.
            whole = self._whole(key, weighted)
            yield from (node_id for node_id in whole if node_id in node_ids and node_id not in head)
        else:
            few = [node_id for node_id in node_ids if node_id in self.views and node_id not in head]
            yield from self._best(len(few), key, few, map(str.encode, few), weighted)

    def _head(self, key: bytes, weighted: bool) -> tuple[str, ...]:
        """Returns the first nodes of a key."""
        asked = self._identity, key, weighted
        known = self._memory.heads.find(asked)
        if known is not None and known.num_changes == self._num_changes:
            return known.node_ids
        head = None if known is None else self._followed(known, key, weighted)
        if head is None:
            head = self._first(_HEAD, key, weighted)
        self._memory.heads.put(asked, FirstNodes(self._num_changes, head))
        return head

    def _followed(self, known: FirstNodes, key: bytes, weighted: bool) -> tuple[str, ...] | None:
        """Returns a head as it is after the changes since; None: it takes a look at all nodes.

        A node that came may belong to the head. One that went, and did not, changes nothing.
        """
        behind = self._num_changes - known.num_changes
        if behind > len(self._changed):
            return None
        changed = set(islice(reversed(self._changed), behind))
        if any(node_id in changed and (weighted or node_id not in self.views) for node_id in known.node_ids):
            return None
        came = [node_id for node_id in changed if node_id in self.views and node_id not in known.node_ids]
        candidates = (*known.node_ids, *came)
        return self._best(_HEAD, key, candidates, map(str.encode, candidates), weighted) if came else known.node_ids

    def _whole(self, key: bytes, weighted: bool) -> tuple[str, ...]:
        """Returns all nodes in the key's order."""
        asked = self.version, key, weighted
        whole = self._memory.whole.find(asked)
        if whole is None:
            whole = self._first(len(self.views), key, weighted)
            self._memory.whole.put(asked, whole)
        return whole

    def _first(self, num: int, key: bytes, weighted: bool) -> tuple[str, ...]:
        """Returns so many nodes, those that come first for the key."""
        if self._names is None:
            self._names = tuple(map(str.encode, self.views))
        return self._best(num, key, self.views, self._names, weighted)

    def _best(self, num: int, key: bytes, node_ids: Collection[str], names: Iterable[bytes], weighted: bool) -> tuple[str, ...]:
        plain = weights(key, names)
        scores: Sequence[bytes] | Sequence[float] = plain
        if weighted:
            capacities = [self.views[node_id].capacity for node_id in node_ids]
            scores = [scaled(int.from_bytes(each, "big"), own) for each, own in zip(plain, capacities, strict=True)]
        return tuple(node_id for _, node_id in nlargest(num, zip(scores, node_ids, strict=True)))

    def _renew(self, node_id: str) -> None:
        self.version, self._names = object(), None
        self._num_changes += 1
        self._changed.append(node_id)

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

    def __init__(self, memory: OrderMemory | None = None) -> None:
        memory = OrderMemory() if memory is None else memory
        self._regular, self._reserve, self._none = NodeGroup(memory), NodeGroup(memory), NodeGroup(memory)

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
