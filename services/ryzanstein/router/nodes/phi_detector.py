"""Suspicion from silence: the phi-accrual failure detector (Hayashibara, Defago, Yared and Katayama, 2004).

phi is minus the decimal logarithm of the probability that a beat that is still missing will come. Nodes beat every 50 ms while
they work and every 500 ms while idle, so each rate has a window of its own; an interval that spans a change of rate is not
counted. Two failures leave the beats as they are: `Progress` judges pending work that does not move, `Echoes` a node that
does not hear this router.
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
# From a beat of this router to the node's answer, before any was measured. Eight times as long is the longest that is learnt.
ROUND_TRIP_S = 0.2
# Answers lie behind all that a node sent while this router stood still: tokens of many generations, perhaps.
BACKLOG_S = 5.0
# More unanswered beats say nothing new: what counts is the oldest.
MAX_UNANSWERED = 64
_STANDARD = NormalDist()


@dataclass(frozen=True, slots=True)
class PhiThresholds:
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


@dataclass(frozen=True, slots=True)
class BeatIntervals:
    """How often a node says that it beats, in seconds: what is expected before any beat was seen."""

    working_s: float = WORKING_INTERVAL_S
    idle_s: float = IDLE_INTERVAL_S


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
    def mean_s(self) -> float:
        return self._sum / len(self._window)

    @property
    def distribution(self) -> NormalDist:
        mean = self.mean_s
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

    def __init__(self, thresholds: PhiThresholds, now: float, intervals: BeatIntervals | None = None) -> None:
        expected = intervals or BeatIntervals()
        self._thresholds = thresholds
        self._rates = {
            True: Intervals(expected.working_s, thresholds.jitter_s),
            False: Intervals(expected.idle_s, thresholds.jitter_s),
        }
        self._working = False
        self._last_beat: float | None = None
        self.last_sign = now

    def beat(self, now: float, working: bool) -> None:
        """A beat arrived; `working`: the node says that it has work, so that the next one comes soon."""
        if self._last_beat is not None and working == self._working:
            self._rates[working].add(now - self._last_beat)
        self._working, self._last_beat, self.last_sign = working, now, now

    def sign(self, now: float) -> None:
        """Anything else arrived: the node lives, but this says nothing about when its beats come."""
        self.last_sign = now

    def phi(self, now: float) -> float:
        return self._rates[self._working].phi(now - self.last_sign)

    @property
    def suspect_at(self) -> float:
        return self.last_sign + self._rates[self._working].silence_s(self._thresholds.suspect_phi)

    @property
    def dead_at(self) -> float:
        silence_s = self._rates[self._working].silence_s(self._thresholds.dead_phi)
        return self.last_sign + silence_s + self._thresholds.grace_s


class Echoes:
    """Judges whether the node hears this router, by the time that it takes to answer the router's beats.

    Every answer shows that the node heard, so silence is counted from the last one: a queue that grows on the way delays all
    answers and stops none. A stream that never had an answer is not judged: an older node sends none. All times come from one
    monotonic clock in seconds.
    """

    def __init__(self, thresholds: PhiThresholds) -> None:
        self._thresholds = thresholds
        # There and back: two processes each way that may have to wait for a core.
        self._round_trips = Intervals(ROUND_TRIP_S, 2 * thresholds.jitter_s)
        self._unanswered: deque[tuple[int, float]] = deque()
        self._newest = 0
        self._answered_at: float | None = None
        self._measured_at = -math.inf
        self._excused = False
        self._last_s = 0.0

    def asked(self, now: float, sequence: int) -> None:
        """A beat is handed to the connection. `sequence` grows."""
        self._newest = sequence
        if len(self._unanswered) < MAX_UNANSWERED:
            self._unanswered.append((sequence, now))

    def answered(self, now: float, sequence: int) -> None:
        """The node has heard this beat and all earlier ones. An answer to a beat that was never sent counts for nothing."""
        if sequence > self._newest:
            return
        self._answered_at = now
        while self._unanswered and self._unanswered[0][0] <= sequence:
            asked_at = self._unanswered.popleft()[1]
            if not self._excused:
                self._measure(asked_at, now)
        self._excused = False

    def excuse(self, now: float) -> None:
        """This router stood still: until it has read the next answer, it has not read what waits in its socket. How long that
        takes is no round trip."""
        if self._answered_at is not None:
            self._answered_at, self._excused = now + BACKLOG_S, True

    def _measure(self, asked_at: float, now: float) -> None:
        """One at a time, as in RFC 6298: what was asked during a pause does not make that pause count several times."""
        if asked_at >= self._measured_at:
            self._measured_at, self._last_s = now, now - asked_at
            # One long while must not hide the next: what is beyond doubt is not learnt as it is.
            self._round_trips.add(min(self._last_s, 2 * self._round_trips.silence_s(self._thresholds.suspect_phi)))

    @property
    def suspect_at(self) -> float:
        return self.unanswered_since + self._silence_s(self._thresholds.suspect_phi)

    @property
    def dead_at(self) -> float:
        return self.unanswered_since + self._silence_s(self._thresholds.dead_phi) + 2 * self._thresholds.grace_s

    @property
    def unanswered_since(self) -> float:
        """Infinite while nothing waits for an answer."""
        if self._answered_at is None or not self._unanswered:
            return math.inf
        return max(self._answered_at, self._unanswered[0][1])

    def _silence_s(self, phi: float) -> float:
        """A way that has just become longer is not suspected again and again until the window has learnt it."""
        return self._round_trips.silence_s(phi) + max(0.0, self._last_s - self._round_trips.mean_s)


class Progress:
    """Judges whether pending work moves. The node's own watchdog does too; this one holds when that one is stuck."""

    def __init__(self, thresholds: PhiThresholds) -> None:
        self._thresholds = thresholds
        self._step = -1
        self._moved_at: float | None = None
        self._step_s = 0.0

    def beat(self, now: float, step: int, pending: bool, *, profiling: bool = False) -> None:
        """`step` counts the engine's steps; `pending`: sequences run or wait; `profiling`: the node says why nothing moves."""
        if not pending:
            self._moved_at = None
        elif self._moved_at is None or profiling:
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
