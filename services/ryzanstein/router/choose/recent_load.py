"""The recent load of one model's nodes: requests placed by this router, compared to fair shares.

Each router measures only its own placements. That is enough: if every router keeps every node below
`load_bound` times its own mean, the sum over all routers is below that bound of the overall mean. A node that was
away is credited with what it would have received; otherwise it would look empty and attract all
sessions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ryzanstein.router.choose.decayed import DecayedCounts
from ryzanstein.router.choose.node_view import NodeView


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How uneven the load is.

    `ratio`: the fullest node's load over its fair share, minus 1. `chance`: the excess that
    independent requests would show by chance alone at this number (the largest of n normal deviates
    is about sqrt(2 ln n)). `mean`: requests per node.
    """

    ratio: float
    chance: float
    mean: float

    @property
    def beyond_chance(self) -> float:
        return self.ratio - self.chance


EVEN = Imbalance(0.0, 0.0, 0.0)


class RecentLoad:
    """Requests placed on each node within the window."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._counts = DecayedCounts(window_s, clock)
        self._clock = clock
        self._known: set[str] = set()
        self._away_since: dict[str, float] = {}

    def placed(self, node_id: str) -> None:
        self._counts.add(node_id)

    def see(self, members: Sequence[NodeView], usable: Sequence[NodeView]) -> None:
        """Records which nodes are present. Called at each choice, before the loads are used."""
        present = {node.node_id for node in usable}
        if present == self._known and not self._away_since:
            return
        now = self._clock()
        self._welcome([node for node in usable if node.node_id not in self._known], usable, now)
        away = {node.node_id for node in members} - present
        self._away_since = {node_id: self._away_since.get(node_id, now) for node_id in away}
        self._known = present
        self._counts.keep(present | away)

    def _welcome(self, newcomers: Sequence[NodeView], usable: Sequence[NodeView], now: float) -> None:
        """Credits nodes that join or return with a fair share of what they missed."""
        others = [node for node in usable if node.node_id in self._known]
        if not newcomers or not others:
            return
        per_unit = sum(self.values(others)) / sum(node.capacity for node in others)
        for node in newcomers:
            missed = self._counts.faded(now - self._away_since.get(node.node_id, -math.inf))
            self._counts.add(node.node_id, missed * per_unit * node.capacity)

    def values(self, nodes: Sequence[NodeView]) -> list[float]:
        """Returns the requests in the window, in the order of the nodes."""
        counts = self._counts.values([node.node_id for node in nodes])
        return [counts[node.node_id] for node in nodes]

    def share(self, nodes: Sequence[NodeView]) -> float:
        """Returns the fair load of one unit of capacity."""
        return sum(self.values(nodes)) / max(1, sum(node.capacity for node in nodes))

    def imbalance(self, nodes: Sequence[NodeView]) -> Imbalance:
        """Returns the imbalance of nodes that share the load."""
        if len(nodes) < 2 or not (share := self.share(nodes)):
            return EVEN
        fullest = max(value / node.capacity for value, node in zip(self.values(nodes), nodes, strict=True))
        mean = sum(self.values(nodes)) / len(nodes)
        return Imbalance(fullest / share - 1.0, math.sqrt(2 * math.log(len(nodes)) / mean), mean)
