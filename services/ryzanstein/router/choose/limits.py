"""Limits: when a node has too much for a request.

Each limit is a value; `exceeded` turns it into a test of a node, for one choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.recent_load import RecentLoad
from ryzanstein.router.choose.rendezvous import tie_breaker, weight

IsFull = Callable[[NodeView], bool]


class Limit(Protocol):
    """A rule for which nodes a request should avoid, whatever it prefers."""

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull: ...


@dataclass(frozen=True, slots=True)
class NoLimit:
    """A limit that no node ever exceeds."""

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
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

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
        if affinity.sticky:
            return lambda node: node.waiting > self.queue_bound
        total = 1 + sum(node.sequences for node in nodes)
        share = math.ceil(self.share_factor * total / max(1, len(nodes)))
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

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
        share = recent.share(nodes)
        loads = dict(zip((node.node_id for node in nodes), recent.values(nodes), strict=True))

        def is_full(node: NodeView) -> bool:
            load = loads[node.node_id]
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

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
        tests = [limit.exceeded(affinity, nodes, recent) for limit in self.limits]
        return lambda node: any(is_full(node) for is_full in tests)
