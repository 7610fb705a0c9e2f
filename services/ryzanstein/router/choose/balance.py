"""Judges how evenly one model's requests are spread: the alarm, and when affinity gets a bound.

There are two questions with two measures. How uneven is the load? That is measured by placements,
and it is the metric. Would affinity alone be uneven? For that, each request counts on the node that
its key belongs to, wherever the request went. The bound evens out the first measure, so a switch
that used it would flip back and forth forever.

Only an excess beyond chance is judged. With 50 requests per node, the fullest of 4 nodes has 24 %
too much by chance alone, and moving sessions would cost their caches without making the load more
even. With few requests nothing is judged and the state does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.router.choose.recent_load import Imbalance


@dataclass(frozen=True, slots=True)
class ImbalanceThresholds:
    """The thresholds, as ratios beyond chance.

    The alarm starts at `alarm` and ends below `calm`. At `switch`, affinity becomes bounded, until
    it would have been below `calm` for `calm_s` seconds. `floor`: the requests per node in the
    window below which nothing is judged.
    """

    alarm: float = 0.10
    switch: float = 0.15
    calm: float = 0.05
    calm_s: float = 900.0
    floor: int = 32


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
