"""Suspicion from silence: the phi-accrual failure detector (Hayashibara, Defago, Yared and Katayama, 2004).

phi is minus the decimal logarithm of the probability that a beat that is still missing will come. Nodes beat every 50 ms while
they work and every 500 ms while idle, so each rate has a window of its own; an interval that spans a change of rate is not
counted. `Progress` judges the other failure: beats come, but pending work does not move.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

WORKING_INTERVAL_S = 0.05
IDLE_INTERVAL_S = 0.5
WINDOW = 100
LONGEST_RATIO = 8.0
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When silence becomes suspicion (the backup starts) and death (the link is given up).

    `jitter_s` is the least standard deviation that is assumed: no node is punctual on a busy machine. `grace_s` is waited
    beyond `dead_phi`, because giving up a link costs every generation on it a recomputation. `stall_s` is the least time
    for which pending work must not move, `stall_steps` the multiple of a usual step.
    """

    suspect_phi: float = 4.0
    dead_phi: float = 8.0
    jitter_s: float = 0.05
    grace_s: float = 0.5
    stall_s: float = 2.0
    stall_steps: float = 10.0


class Intervals:
    """The last intervals between beats of one rate, as a normal distribution."""

    def __init__(self, expected_s: float, jitter_s: float) -> None:
        self._longest_s = LONGEST_RATIO * expected_s
        self._window: deque[float] = deque([expected_s], WINDOW)
        self._jitter_s = max(jitter_s, expected_s / 4)
        self._sum = expected_s
        self._squares = expected_s**2

    def add(self, interval_s: float) -> None:
        # A node that was frozen and thawed must not make the next freeze look usual.
        interval_s = min(interval_s, self._longest_s)
        if len(self._window) == WINDOW:
            oldest = self._window[0]
            self._sum -= oldest
            self._squares -= oldest**2
        self._window.append(interval_s)
        self._sum += interval_s
        self._squares += interval_s**2

    @property
    def distribution(self) -> NormalDist:
        mean = self._sum / len(self._window)
        variance = self._squares / len(self._window) - mean**2
        return NormalDist(mean, max(self._jitter_s, math.sqrt(max(0.0, variance))))

    def phi(self, elapsed_s: float) -> float:
        """How unlikely such a silence is."""
        tail = 1.0 - self.distribution.cdf(elapsed_s)
        return -math.log10(tail) if tail > 0 else math.inf

    def silence_s(self, phi: float) -> float:
        """The silence after which `phi` is reached: the inverse of `phi`."""
        distribution = self.distribution
        return distribution.mean - distribution.stdev * _STANDARD.inv_cdf(10.0**-phi)


class BeatDetector:
    """Judges one link's silence. All times come from one monotonic clock in seconds."""

    def __init__(self, thresholds: Thresholds, now: float) -> None:
        self._thresholds = thresholds
        self._rates = {
            True: Intervals(WORKING_INTERVAL_S, thresholds.jitter_s),
            False: Intervals(IDLE_INTERVAL_S, thresholds.jitter_s),
        }
        self._working = False
        self._last_beat: float | None = None
        self._last_sign = now

    def beat(self, now: float, working: bool) -> None:
        """A beat arrived; `working`: the node says that it has work, so that the next one comes soon."""
        if self._last_beat is not None and working == self._working:
            self._rates[working].add(now - self._last_beat)
        self._working, self._last_beat, self._last_sign = working, now, now

    def sign(self, now: float) -> None:
        """Anything else arrived: the node lives, but this says nothing about when its beats come."""
        self._last_sign = now

    def phi(self, now: float) -> float:
        return self._rates[self._working].phi(now - self._last_sign)

    @property
    def suspect_at(self) -> float:
        return self._last_sign + self._rates[self._working].silence_s(self._thresholds.suspect_phi)

    @property
    def dead_at(self) -> float:
        silence_s = self._rates[self._working].silence_s(self._thresholds.dead_phi)
        return self._last_sign + silence_s + self._thresholds.grace_s


class Progress:
    """Judges whether pending work moves. The node's own watchdog does too; this one holds when that one is stuck."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._step = -1
        self._moved_at: float | None = None
        self._step_s = 0.0

    def beat(self, now: float, step: int, pending: bool) -> None:
        """`step` counts the engine's steps; `pending`: sequences run or wait."""
        if not pending:
            self._moved_at = None
        elif self._moved_at is None:
            self._moved_at = now
        elif step > self._step:
            self._step_s += 0.2 * ((now - self._moved_at) / (step - self._step) - self._step_s)
            self._moved_at = now
        elif step < self._step:
            self._moved_at = now
        self._step = step

    @property
    def stalled_at(self) -> float:
        """When the work counts as stalled if nothing moves until then; infinite with none pending."""
        if self._moved_at is None:
            return math.inf
        return self._moved_at + max(self._thresholds.stall_s, self._thresholds.stall_steps * self._step_s)
