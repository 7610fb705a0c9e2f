"""Policies order nodes for a request; `pick` moves those back that a limit finds too full.

Limits: when a node has too much for a request.

Each limit is a value; `exceeded` turns it into a test of a node, for one choice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity, affinity
from ryzanstein.router.choose.members import NodeGroup
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.recent_load import RecentLoad
from ryzanstein.router.choose.rendezvous import tie_breaker, weight

IsFull = Callable[[NodeView], bool]


class Limit(Protocol):
    """A rule for which nodes a request should avoid, whatever it prefers."""

    def exceeded(self, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> IsFull:
        """Returns a test of the takers, which are usable nodes of a group."""
        ...


@dataclass(frozen=True, slots=True)
class NoLimit:
    """A limit that no node ever exceeds."""

    def exceeded(self, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> IsFull:
        return lambda node: False


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """A limit on what waits or runs on a node at this moment.

    A conversation waits for its node while at most `queue_bound` sequences wait there. A key that
    is only a good guess moves on when the node has `share_factor` times its share of what runs at
    this moment (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018).
    """

    queue_bound: int
    share_factor: float = 1.25

    def exceeded(self, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> IsFull:
        if affinity.sticky:
            return lambda node: node.waiting > self.queue_bound
        total = 1 + nodes.num_sequences(takers)
        share = math.ceil(self.share_factor * total / max(1, len(takers)))
        return lambda node: node.sequences >= share


@dataclass(frozen=True, slots=True)
class RecentLimit:
    """Bounded loads over the window instead of at one moment.

    A node over its fair share sheds keys: all of them at `load_bound` times its share, and below
    that only the keys whose own bound is lower.

    Each (key, node) has its own bound, drawn from the hash and uniform between 1 and `load_bound`.
    A node then sheds the same keys turn after turn and on every router, and those keys settle on
    their second choice. One bound for all keys would shed whichever request arrives at the wrong
    moment, and every conversation of the node would occasionally find a cold cache.

    A session that is at home on a node stays up to the full bound, and always stays while nothing
    runs there: new sessions move first, and a session alone in a cluster does not move merely
    because it is all of the load. A node with fewer than `floor` requests in the window is never
    full: with little load, evenness gains nothing.
    """

    load_bound: float
    floor: int

    def exceeded(self, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> IsFull:
        share = recent.total(takers) / max(1, nodes.num_capacity(takers))

        def is_full(node: NodeView) -> bool:
            load = recent.value(node.node_id)
            excess = load / (share * node.capacity) - 1.0 if load else -1.0
            at_home = affinity.home == node.node_id
            if load < self.floor or excess < 0.0 or (at_home and not node.sequences):
                return False
            return excess >= (self.load_bound - 1.0) * (1.0 if at_home else tie_breaker(weight(affinity.key, node.node_id)))

        return is_full


@dataclass(frozen=True, slots=True)
class AnyLimit:
    """A limit that is exceeded when any of its limits is."""

    limits: tuple[Limit, ...]

    def exceeded(self, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> IsFull:
        tests = [limit.exceeded(affinity, nodes, takers, recent) for limit in self.limits]
        return lambda node: any(is_full(node) for is_full in tests)


class Policy(Protocol):
    """How one model's requests find their nodes.

    An order is read no further than it is needed. The nodes must be usable where the policy is not `keyed`.
    """

    @property
    def name(self) -> str: ...

    @property
    def keyed(self) -> bool:
        """Whether a key belongs to one node, the first of its ranking, regardless of load."""
        ...

    @property
    def homing(self) -> bool:
        """Whether the node that answered the session last comes first, if it is known.

        A session that once had to leave its key's node then stays where it went and where its cache
        is.
        """
        ...

    @property
    def limit(self) -> Limit: ...

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        """Returns what the request stays near."""
        ...

    def order(self, affinity: Affinity, nodes: NodeGroup, node_ids: Set[str]) -> Iterator[str]:
        """Returns these of the nodes, best first, as they are at this moment. Does not consider a session's home."""
        ...

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """Records that the request was given to this node."""
        ...


def pick(policy: Policy, affinity: Affinity, nodes: NodeGroup, takers: frozenset[str], recent: RecentLoad) -> Iterator[str]:
    """Returns usable nodes of a group in the order in which to use them.

    The first two are the first nodes of the policy's order that are not too full: the request's node and
    its backup. The others follow in that order. When all are too full, the order is by load relative to
    capacity, the lowest first.
    """
    order = policy.order(affinity, nodes, takers)
    if policy.homing and affinity.home in takers:
        order = chain((affinity.home,), _without(affinity.home, order))
    is_full = policy.limit.exceeded(affinity, nodes, takers, recent)
    free: list[str] = []
    full: list[str] = []
    for node_id in order:
        (full if is_full(nodes.views[node_id]) else free).append(node_id)
        if len(free) == 2:
            break
    if not free:
        return iter(sorted(full, key=nodes.relative_loads.__getitem__))
    return chain(free, full, order)


def _without(node_id: str, order: Iterator[str]) -> Iterator[str]:
    return (other for other in order if other != node_id)


@dataclass(frozen=True, slots=True)
class Sticky:
    """A policy that orders nodes by the key, each with the same number of keys or `weighted` by its capacity."""

    name: str
    limit: Limit
    homing: bool = False
    keyed: bool = True
    weighted: bool = False

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def order(self, affinity: Affinity, nodes: NodeGroup, node_ids: Set[str]) -> Iterator[str]:
        return nodes.order(affinity.key, node_ids, weighted=self.weighted)

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """Does nothing: this policy has no state."""


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """A policy that prefers the node with the fewest sequences for its capacity.

    Between equal nodes the key's own order decides, so that an idle cluster does not send every
    request to the first node of a list.
    """

    name: str
    limit: Limit = field(default_factory=NoLimit)
    homing: bool = False
    keyed: bool = False

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def order(self, affinity: Affinity, nodes: NodeGroup, node_ids: Set[str]) -> Iterator[str]:
        alike: dict[float, set[str]] = defaultdict(set)
        for node_id in node_ids:
            alike[nodes.relative_loads[node_id]].add(node_id)
        return chain.from_iterable(nodes.order(affinity.key, alike[load]) for load in sorted(alike))

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """Does nothing: a placement shows in the load."""


@dataclass(slots=True)
class RoundRobin:
    """A policy that takes the nodes in turn, whatever their load.

    Each router has its own `turn` and begins at another node.
    """

    name: str
    turn: int = 0
    limit: Limit = field(default_factory=NoLimit)
    homing: bool = False
    keyed: bool = False

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def order(self, affinity: Affinity, nodes: NodeGroup, node_ids: Set[str]) -> Iterator[str]:
        names = nodes.able_by_name
        first = self.turn % max(1, len(names))
        return (node_id for node_id in names[first:] + names[:first] if node_id in node_ids)

    def placed(self, affinity: Affinity, node_id: str) -> None:
        self.turn += 1
