"""When a node has too much for a request. Each limit is a value; `exceeded` makes it a test of a node, for one choice."""

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
    """Says which nodes a request should not go to, whatever it prefers."""

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull: ...


@dataclass(frozen=True, slots=True)
class NoLimit:
    """No node is ever too full."""

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
        return lambda node: False


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """A conversation waits for its node while at most `queue_bound` sequences wait there. A key that is only a good guess
    moves on when the node carries `share_factor` times its share of what runs at this moment (consistent hashing with
    bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018)."""

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
    """Bounded loads over the window instead of over a moment: a node over its fair share sheds keys, at `load_bound` times
    its share all of them, below that only those whose own bound lies lower.

    Each (key, node) has its own bound, drawn from the hash and uniform between 1 and `load_bound`. A node then sheds the same
    keys turn after turn and on every router, and they settle on their second choice; one bound for all keys would shed
    whichever request comes at the wrong moment, and every conversation of the node would now and then find a cold cache. A
    session that is at home on a node stays up to the full bound, and whenever nothing runs there: what is new goes elsewhere
    first, and a session alone in a cluster is not moved for being all of its load.
    A node with fewer than `floor` requests in the window is never full: where little runs, evenness buys nothing.
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
    """Full by one is full."""

    limits: tuple[Limit, ...]

    def exceeded(self, affinity: Affinity, nodes: Sequence[NodeView], recent: RecentLoad) -> IsFull:
        tests = [limit.exceeded(affinity, nodes, recent) for limit in self.limits]
        return lambda node: any(is_full(node) for is_full in tests)
