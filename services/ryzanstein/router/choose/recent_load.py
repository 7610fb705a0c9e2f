"""The recent load of one model's nodes: requests placed by this router, compared to fair shares.

Each router measures only its own placements. That is enough: if every router keeps every node below
`load_bound` times its own mean, the sum over all routers is below that bound of the overall mean. A
node that was away is credited with what it would have received; otherwise it would look empty and
attract all sessions at once.

Old placements fade out. From the counts it is judged how evenly the requests are spread: for the alarm,
and for when affinity gets a bound. There are two questions with two measures. How uneven is the load?
That is measured by placements, and it is the metric. Would affinity alone be uneven? For that, each
request counts on the node that its key belongs to, wherever the request went. The bound evens out the
first measure, so a switch that used it would flip back and forth forever.

Only an excess beyond chance is judged. With 50 requests per node, the fullest of 4 nodes has 24 %
too much by chance alone, and moving sessions would cost their caches without making the load more
even. With few requests nothing is judged and the state does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import PositiveSize, Seconds
from ryzanstein.router.choose.node_view import NodeView

# Above this exponent the growing unit is folded back into the counts, long before a float
# overflows.
_LARGEST_EXPONENT = 50.0


class DecayedCounts:
    """A count per node in which an event of age t weighs exp(-t / window_s).

    This is a sliding window without edges that stores one number per node (forward decay: Cormode,
    Shkapenyuk, Srivastava and Xu, 2009). In a steady state a count is rate x `window_s`.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._landmark = clock()
        self._scaled: dict[str, float] = {}
        self._summed: frozenset[str] = frozenset()
        self._sum = 0.0

    def add(self, node_id: str, amount: float = 1.0) -> None:
        # Compute the unit first: this may fold all counts.
        unit = self._unit()
        self._scaled[node_id] = self._scaled.get(node_id, 0.0) + amount * unit
        if node_id in self._summed:
            self._sum += amount * unit

    def value(self, node_id: str) -> float:
        """Returns the events in the window; 0 for a node that had none."""
        unit = self._unit()
        return self._scaled.get(node_id, 0.0) / unit

    def total(self, node_ids: frozenset[str]) -> float:
        """Returns the events of these nodes in the window. Of the same set of nodes again, it is there already."""
        unit = self._unit()
        if node_ids is not self._summed:
            self._summed, self._sum = node_ids, sum(self._scaled.get(node_id, 0.0) for node_id in node_ids)
        return self._sum / unit

    def values(self, node_ids: Collection[str]) -> dict[str, float]:
        unit = self._unit()
        return {node_id: self._scaled.get(node_id, 0.0) / unit for node_id in node_ids}

    def faded(self, age_s: float) -> float:
        """Returns the fraction of a count that has faded after `age_s` seconds."""
        return 1.0 - math.exp(-age_s / self._window_s)

    def keep(self, node_ids: Mapping[str, object]) -> None:
        """Forgets all other nodes."""
        for node_id in self._scaled.keys() - node_ids.keys():
            del self._scaled[node_id]
            self._summed, self._sum = frozenset(), 0.0

    def __iter__(self) -> Iterator[str]:
        return iter(self._scaled)

    def __len__(self) -> int:
        return len(self._scaled)

    def _unit(self) -> float:
        """Returns what one event weighs now, relative to an event at the landmark."""
        exponent = (self._clock() - self._landmark) / self._window_s
        if exponent > _LARGEST_EXPONENT:
            self._landmark += exponent * self._window_s
            self._scaled = {node_id: value * math.exp(-exponent) for node_id, value in self._scaled.items()}
            self._summed, self._sum = frozenset(), 0.0
            return 1.0
        return math.exp(exponent)


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
        self._known = frozenset[str]()
        self._away_since: dict[str, float] = {}

    def placed(self, node_id: str) -> None:
        self._counts.add(node_id)

    def see(self, views: Mapping[str, NodeView], able: frozenset[str]) -> None:
        """Records which nodes are present, and `able` to take work. Called at a choice after each change of them.

        The sets are compared as wholes, which is quick: one node that is suspected again and again calls this at every choice.
        """
        if able == self._known and not self._away_since:
            return
        now = self._clock()
        self._welcome(able - self._known, able & self._known, views, now)
        self._away_since = {node_id: self._away_since.get(node_id, now) for node_id in views.keys() - able}
        self._known = able
        self._counts.keep(views)

    def _welcome(self, newcomers: Set[str], others: frozenset[str], views: Mapping[str, NodeView], now: float) -> None:
        """Credits nodes that join or return with a fair share of what they missed."""
        if not newcomers or not others:
            return
        per_unit = self._counts.total(others) / sum(views[node_id].capacity for node_id in others)
        for node_id in newcomers:
            missed = self._counts.faded(now - self._away_since.get(node_id, -math.inf))
            self._counts.add(node_id, missed * per_unit * views[node_id].capacity)

    def values(self, nodes: Sequence[NodeView]) -> list[float]:
        """Returns the requests in the window, in the order of the nodes."""
        counts = self._counts.values([node.node_id for node in nodes])
        return [counts[node.node_id] for node in nodes]

    def value(self, node_id: str) -> float:
        """Returns the node's requests in the window."""
        return self._counts.value(node_id)

    def total(self, node_ids: frozenset[str]) -> float:
        """Returns the requests of these nodes in the window."""
        return self._counts.total(node_ids)

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


_Excess = Annotated[float, Field(gt=0, le=10)]


@dataclass(frozen=True, slots=True)
class ImbalanceThresholds:
    """The thresholds of the imbalance, as ratios beyond chance: calm < alarm <= switch."""

    alarm: _Excess = 0.10
    """At which the alarm starts."""
    switch: _Excess = 0.15
    """At which affinity becomes bounded."""
    calm: _Excess = 0.05
    """Below which the alarm ends."""
    calm_s: Seconds = 900.0
    """How long affinity would have been below `calm` until bounded becomes affinity again, in seconds."""
    floor: PositiveSize = 32
    """Requests per node within the window below which nothing is judged."""

    def __post_init__(self) -> None:
        if not self.calm < self.alarm <= self.switch:
            raise ValueError("must be calm < alarm <= switch")


class Balance:
    """The state of one model's balance: `alarm` and `skewed`. Call `judge` from time to time."""

    def __init__(self, thresholds: ImbalanceThresholds, clock: Callable[[], float]) -> None:
        self._thresholds = thresholds
        self._clock = clock
        self._calm_since: float | None = None
        self.alarm = False
        self.skewed = False

    def judge(self, placed: Imbalance, wanted: Imbalance) -> None:
        """Updates the state.

        `placed`: where requests went. `wanted`: where affinity alone would have sent them.
        """
        if min(placed.mean, wanted.mean) < self._thresholds.floor:
            return
        self.alarm = self._alarm(placed.beyond_chance)
        if wanted.beyond_chance >= self._thresholds.switch:
            self.skewed = True
        if self._calm(wanted.beyond_chance):
            self.skewed = False

    def _alarm(self, excess: float) -> bool:
        return excess >= (self._thresholds.calm if self.alarm else self._thresholds.alarm)

    def _calm(self, excess: float) -> bool:
        """Returns whether the load has been even for long enough."""
        if excess >= self._thresholds.calm:
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = self._clock()
        return self._clock() - self._calm_since >= self._thresholds.calm_s
