"""Ten minutes of figures of a cluster. A rate is the difference of two samples; a figure that nobody tells is left out."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from ryzanstein.client import clean
from ryzanstein.survey.views import ClusterStatus, Distribution, EngineFigures, RouterFigures

KEPT_S = 600.0
MOST_LINES = 8
"""Nodes that have a line of their own; the others are one."""
OTHERS = "others"
_FIRST_TOKENS_S = 30.0


@dataclass(frozen=True, slots=True)
class NodeRate:
    """What a node did between two looks: tokens a second, and which share of its prompts it had computed before."""

    tokens_per_s: float | None = None
    prefix_hits: float | None = None


class NodeRates:
    """The rates of nodes that tell counts."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, EngineFigures]] = {}

    def take(self, status: ClusterStatus, now_s: float) -> dict[str, NodeRate]:
        """Returns the rates by the names of nodes. `now_s` is monotonic."""
        told = {each.node.node_id: each.figures for each in status.nodes if each.figures is not None}
        found = {name: self._of(name, figures, now_s) for name, figures in told.items()}
        self._before = {name: (now_s, figures) for name, figures in told.items()}
        return found

    def _of(self, name: str, figures: EngineFigures, now_s: float) -> NodeRate:
        before_s, before = self._before.get(name, (now_s, figures))
        made, seconds = figures.decode_tokens - before.decode_tokens, now_s - before_s
        rate = made / seconds if seconds > 0 and made >= 0 else None  # less: its ranks are others
        hits = figures.prefix_hits / figures.prefix_queries if figures.prefix_queries else None
        return NodeRate(rate, hits)


class ChartPoint(msgspec.Struct, omit_defaults=True):
    """One look at the cluster, at Unix seconds; by the names of nodes `tokens` a second and `kv`, the used share of blocks.

    `first` are milliseconds to the first token below which half and 95 % of the answers of the last half minute came. `waiting`
    are sequences by priority, and `unaccepted` those that no node has taken. Both are of the routers that the console knows.
    """

    at: float
    tokens: dict[str, float] = {}
    first: tuple[float, float] | None = None
    waiting: dict[str, int] = {}
    unaccepted: int | None = None
    running: int = 0
    kv: dict[str, float] = {}


class History:
    """The points of the last ten minutes."""

    def __init__(self) -> None:
        self.points: deque[ChartPoint] = deque()
        self._first_tokens: dict[str, deque[tuple[float, Distribution]]] = {}

    def take(
        self, status: ClusterStatus, rates: dict[str, NodeRate], routers: dict[str, RouterFigures], now_s: float, unix_s: float
    ) -> ChartPoint:
        """Adds a look. `routers` tell figures, by their addresses. `now_s` is monotonic, `unix_s` for people."""
        tokens = {name: rate.tokens_per_s for name, rate in rates.items() if rate.tokens_per_s is not None}
        loads = {each.node.node_id: each.node.load for each in status.nodes if not each.error}
        waiting: Counter[int] = Counter()
        for each in status.nodes:
            if each.figures is not None:
                waiting.update(each.figures.waiting)
        point = ChartPoint(
            round(unix_s, 1),
            _lines(tokens),
            self._first(routers, now_s),
            {str(priority): count for priority, count in sorted(waiting.items())},
            sum(each.waiting for each in routers.values()) if routers else None,
            sum(load.running for load in loads.values()),
            {
                clean(name): round(load.kv_blocks_used / load.kv_blocks_total, 4)
                for name, load in sorted(loads.items())[:MOST_LINES]
                if load.kv_blocks_total
            },
        )
        self.points.append(point)
        while self.points[0].at < unix_s - KEPT_S:
            self.points.popleft()
        return point

    def _first(self, routers: dict[str, RouterFigures], now_s: float) -> tuple[float, float] | None:
        self._first_tokens = {address: self._first_tokens.get(address, deque()) for address in routers}
        lately = Distribution()
        for address, told in self._first_tokens.items():
            told.append((now_s, routers[address].time_to_first_token))
            while told[0][0] < now_s - _FIRST_TOKENS_S:
                told.popleft()
            if len(told) > 1:
                lately = lately.plus(told[-1][1].since(told[0][1]))
        half, most = lately.quantile(0.5), lately.quantile(0.95)
        return None if half is None or most is None else (round(half * 1e3, 1), round(most * 1e3, 1))


def _lines(values: dict[str, float]) -> dict[str, float]:
    """Returns the values of the first nodes by name, and the sum of the others."""
    names = sorted(values)
    found = {clean(name): round(values[name], 1) for name in names[:MOST_LINES]}
    if rest := names[MOST_LINES:]:
        found[OTHERS] = round(sum(values[name] for name in rest), 1)
    return found
