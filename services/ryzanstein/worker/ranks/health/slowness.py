"""Finds the rank that slows its group down: it computes long where the others wait long.

Plain logic on what the board says. Tensor-parallel ranks do equal work between collectives, so
their computing times compare directly, whatever the model or the batch. A slow rank stalls nothing,
no detector of stalls sees it, and every token of the node is late.

Only time in steps counts against a rank. Time without steps reduces the count slowly: after a pause
caches are cold and pages are not resident, and the slow first seconds that follow must not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import LARGEST, PositiveSeconds, Seconds
from ryzanstein.worker.supervision.group import RankProgress

_WINDOW_S = 1.0
_WINDOW_STEPS = 4
# Slow time forgotten per second without a step. A rank that is slow whenever it works is found as
# long as steps take more than a tenth of the time.
_FORGOTTEN_S = 0.1


@dataclass(frozen=True, slots=True)
class SlowBounds:
    """When a rank is slow, and what follows. Times are in seconds."""

    factor: Annotated[float, Field(gt=1, le=LARGEST)] = 4.0
    """A slow rank computes so many times as long as the median of the others."""
    gap_s: Seconds = 0.0005
    """It also computes so much longer per step."""
    warn_s: PositiveSeconds = 5.0
    """Time of slow steps after which the rank is logged."""
    restart_s: Seconds = 60.0
    """Time of slow steps after which its group is restarted; 0: never."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A slow rank: it computes `ratio` times as long as its peers.

    It has done so for `slow_s` seconds of the recent time in steps.
    """

    rank: int
    ratio: float
    slow_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} computes {self.ratio:.1f} times as long as its peers, for {self.slow_s:.0f} s of work"


class Slowness:
    """A detector of slow ranks: call `observe` with the ranks a few times a second.

    `ratios` compares each rank with the median of the others, recently.
    """

    def __init__(self, bounds: SlowBounds) -> None:
        self._bounds = bounds
        self._before: Sequence[RankProgress] = ()
        self._since = 0.0
        self._slow: int | None = None
        self._slow_s = 0.0
        self.ratios: dict[int, float] = {}

    def observe(self, now: float, ranks: Sequence[RankProgress]) -> SlowRank | None:
        """Returns a rank that has been slow for `warn_s`, or None.

        `now` is monotonic seconds; idle time does not count.
        """
        if len(ranks) < 2:
            return None
        if not self._before:
            self._before, self._since = ranks, now
        steps = [rank.step - before.step for rank, before in zip(ranks, self._before, strict=True)]
        if now - self._since < _WINDOW_S or min(steps) < _WINDOW_STEPS:
            return None
        computed = [
            (rank.compute_s - before.compute_s) / num for rank, before, num in zip(ranks, self._before, steps, strict=True)
        ]
        passed_s, busy_s = now - self._since, _busy_s(self._before, ranks)
        self._before, self._since = ranks, now
        self._slow_s = max(0.0, self._slow_s - _FORGOTTEN_S * max(0.0, passed_s - busy_s))
        return self._judge(computed, min(busy_s, passed_s))

    def _judge(self, computed: list[float], busy_s: float) -> SlowRank | None:
        others = [median(computed[:i] + computed[i + 1 :]) for i in range(len(computed))]
        self.ratios = {i: own / max(other, 1e-6) for i, (own, other) in enumerate(zip(computed, others, strict=True))}
        worst = max(self.ratios, key=lambda rank: self.ratios[rank])
        is_slow = self.ratios[worst] >= self._bounds.factor and computed[worst] - others[worst] >= self._bounds.gap_s
        if not is_slow:
            # One good second does not clear a rank that was slow for many.
            self._slow_s = max(0.0, self._slow_s - 2 * busy_s)
            return None
        self._slow_s = self._slow_s + busy_s if worst == self._slow else busy_s
        self._slow = worst
        return SlowRank(worst, self.ratios[worst], self._slow_s) if self._slow_s >= self._bounds.warn_s else None

    def is_too_long(self, slow: SlowRank) -> bool:
        """Returns whether the rank has been slow long enough to restart the group."""
        return 0 < self._bounds.restart_s <= slow.slow_s


def _busy_s(before: Sequence[RankProgress], ranks: Sequence[RankProgress]) -> float:
    """Returns how long steps took in between.

    Every rank is in all of them, computing or waiting for its peers.
    """
    return max(_in_steps_s(rank) - _in_steps_s(earlier) for rank, earlier in zip(ranks, before, strict=True))


def _in_steps_s(rank: RankProgress) -> float:
    return rank.compute_s + rank.collectives_s
