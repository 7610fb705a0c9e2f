"""Watches how evenly one model's requests fall, raises an alarm, and says when affinity alone must give way to a bound.

Two questions, two measures. How uneven is it: placements, the metric. Would affinity alone be uneven: each request counted on
the node that its key belongs to, wherever it went. The bound evens the first one out, so that judging by it would switch back
and forth for ever.

Only an excess beyond chance is judged: with 50 requests a node the fullest of 4 has 24 % too much by chance alone, and moving
sessions would cost their caches without making anything more even. With few requests nothing is judged and the state stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.router.choose.recent_load import Imbalance


@dataclass(frozen=True, slots=True)
class ImbalanceThresholds:
    """Ratios beyond chance: from `alarm` on there is an alarm, until it is below `calm`; at `switch` affinity becomes bounded,
    until it would have been below `calm` for `calm_s` seconds. `floor`: requests a node in the window from which on there
    is a judgement."""

    alarm: float = 0.10
    switch: float = 0.15
    calm: float = 0.05
    calm_s: float = 900.0
    floor: int = 32


class Balance:
    """`judge` now and then; `alarm` and `skewed` are the state."""

    def __init__(self, thresholds: ImbalanceThresholds, clock: Callable[[], float]) -> None:
        self._thresholds = thresholds
        self._clock = clock
        self._calm_since: float | None = None
        self.alarm = False
        self.skewed = False

    def judge(self, placed: Imbalance, wanted: Imbalance) -> None:
        """`placed`: where requests went. `wanted`: where affinity alone would have sent them."""
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
        """It has been even for long enough."""
        if excess >= self._thresholds.calm:
            self._calm_since = None
            return False
        if self._calm_since is None:
            self._calm_since = self._clock()
        return self._clock() - self._calm_since >= self._thresholds.calm_s
