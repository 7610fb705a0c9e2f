"""Suspicion from silence: the phi-accrual failure detector.

phi (Hayashibara, Defago, Yared and Katayama, 2004) is minus the decimal logarithm of the
probability that a beat that is still missing will come. Nodes beat every 50 ms while they work and
every 500 ms while idle, so each rate has its own window; an interval that spans a change of rate is
not counted. Two failures do not affect the beats: `Progress` detects pending work that does not
move, and `Echoes` a node that does not receive this router's frames.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated

from pydantic import Field

from ryzanstein.bounds import LARGEST, PositiveSeconds, Seconds

WORKING_INTERVAL_S = 0.05
IDLE_INTERVAL_S = 0.5
# What this router asks for on streams on which it has no work. It beats as seldom then, and the node answers with its own beat.
QUIET_INTERVAL_S = 2.0
WINDOW = 100
LONGEST_RATIO = 8.0
# The assumed time from a beat of this router to the node's answer, before any is measured. A longer
# time than eight times this is learned as eight times.
ROUND_TRIP_S = 0.2
# After a pause of this router, answers are queued behind everything that the node sent meanwhile,
# possibly tokens of many generations.
BACKLOG_S = 5.0
# More unanswered beats add nothing: only the oldest counts.
MAX_UNANSWERED = 64
_STANDARD = NormalDist()


@lru_cache(maxsize=64)
def _deviations(phi: float) -> float:
    """Returns how many standard deviations before the mean the probability of the rest is one in 10 to the `phi`."""
    return _STANDARD.inv_cdf(10.0**-phi)


@dataclass(frozen=True, slots=True)
class PhiThresholds:
    """When silence becomes suspicion (the hedge starts) and death (the link is given up)."""

    suspect_phi: Annotated[float, Field(gt=0, le=12)] = 4.0
    """Phi at which a hedge starts."""
    dead_phi: Annotated[float, Field(gt=0, le=12)] = 8.0
    """Phi at which a link is given up, after `grace_s` more."""
    jitter_s: PositiveSeconds = 0.05
    """The least standard deviation of beats that is assumed, in seconds: no node is punctual on a busy
    machine. That of answers is twice this."""
    grace_s: Seconds = 0.5
    """Seconds beyond `dead_phi`, because giving up a link costs a recomputation of every generation on it.
    Twice this for a node that beats but does not answer."""
    stall_s: PositiveSeconds = 2.0
    """The least time without a step, with work pending, that is a stall, in seconds."""
    stall_steps: Annotated[float, Field(gt=0, le=LARGEST)] = 10.0
    """The least multiple of a usual step that is a stall."""


@dataclass(frozen=True, slots=True)
class BeatIntervals:
    """How often a node announces that it beats, in seconds: expected before any beat is seen."""

    working_s: float = WORKING_INTERVAL_S
    idle_s: float = IDLE_INTERVAL_S


class BeatRate(Enum):
    """How often a node beats on a stream. QUIET: seldom, because nothing of this router runs there."""

    WORKING = "working"
    IDLE = "idle"
    QUIET = "quiet"


class Intervals:
    """The last intervals between beats of one rate, as a normal distribution."""

    def __init__(self, expected_s: float, jitter_s: float) -> None:
        self._longest_s = LONGEST_RATIO * expected_s
        self._window: deque[float] = deque([expected_s], WINDOW)
        self._jitter_s = max(jitter_s, expected_s / 4)
        self._sum = expected_s
        self._squares = expected_s**2
        self._silences: dict[float, float] = {}
        """By phi, since the last interval: every frame asks for the same few."""

    def add(self, interval_s: float) -> None:
        # A node that was frozen and resumed must not make the next freeze look usual.
        interval_s = min(interval_s, self._longest_s)
        if len(self._window) == WINDOW:
            oldest = self._window[0]
            self._sum -= oldest
            self._squares -= oldest**2
        self._window.append(interval_s)
        self._silences.clear()
        self._sum += interval_s
        self._squares += interval_s**2

    @property
    def mean_s(self) -> float:
        return self._sum / len(self._window)

    @property
    def _deviation_s(self) -> float:
        variance = self._squares / len(self._window) - self.mean_s**2
        return max(self._jitter_s, math.sqrt(max(0.0, variance)))

    def phi(self, elapsed_s: float) -> float:
        """Returns how unlikely such a silence is."""
        tail = 1.0 - NormalDist(self.mean_s, self._deviation_s).cdf(elapsed_s)
        return -math.log10(tail) if tail > 0 else math.inf

    def silence_s(self, phi: float) -> float:
        """Returns the silence after which `phi` is reached: the inverse of `phi`."""
        silence_s = self._silences.get(phi)
        if silence_s is None:
            silence_s = self._silences[phi] = self.mean_s - self._deviation_s * _deviations(phi)
        return silence_s


class BeatDetector:
    """Judges one link's silence. All times come from one monotonic clock in seconds."""

    def __init__(self, thresholds: PhiThresholds, now: float, intervals: BeatIntervals | None = None) -> None:
        expected = intervals or BeatIntervals()
        self._thresholds = thresholds
        self._rates = {
            BeatRate.WORKING: Intervals(expected.working_s, thresholds.jitter_s),
            BeatRate.IDLE: Intervals(expected.idle_s, thresholds.jitter_s),
            BeatRate.QUIET: Intervals(QUIET_INTERVAL_S, thresholds.jitter_s),
        }
        self.rate, self._expected = BeatRate.IDLE, self._rates[BeatRate.IDLE]
        self._last_beat: float | None = None
        self.last_sign = now

    def beat(self, now: float, rate: BeatRate) -> None:
        """Records a beat, and how soon the next one comes.

        The intervals of a quiet stream are not learned: beats that say something new come between the others.
        """
        if rate is not self.rate:
            self._change(rate)
        elif self._last_beat is not None and rate is not BeatRate.QUIET:
            self._expected.add(now - self._last_beat)
        self._last_beat = self.last_sign = now

    def expect(self, now: float) -> None:
        """Records that the node was given work on a quiet stream: it beats at once, or it is silent from now on."""
        self._change(BeatRate.IDLE)
        self._last_beat, self.last_sign = None, now

    def _change(self, rate: BeatRate) -> None:
        self.rate, self._expected = rate, self._rates[rate]

    def sign(self, now: float) -> None:
        """Records any other frame: the node is alive, but its beat intervals are not updated."""
        self.last_sign = now

    def phi(self, now: float) -> float:
        return self._expected.phi(now - self.last_sign)

    @property
    def suspect_at(self) -> float:
        return self.last_sign + self._expected.silence_s(self._thresholds.suspect_phi)

    @property
    def dead_at(self) -> float:
        silence_s = self._expected.silence_s(self._thresholds.dead_phi)
        return self.last_sign + silence_s + self._thresholds.grace_s


class Echoes:
    """Judges whether the node receives this router's frames, by its answers to the router's beats.

    Every answer shows that the node received a beat, so silence counts from the last answer: a
    growing queue on the way delays all answers and stops none. A stream that never had an answer is
    not judged, because older nodes send none. All times come from one monotonic clock in seconds.
    """

    def __init__(self, thresholds: PhiThresholds) -> None:
        self._thresholds = thresholds
        # There and back: in each direction two processes may have to wait for a core.
        self._round_trips = Intervals(ROUND_TRIP_S, 2 * thresholds.jitter_s)
        self._unanswered: deque[tuple[int, float]] = deque()
        self._newest = 0
        self._answered_at: float | None = None
        self._measured_at = -math.inf
        self._excused = False
        self._last_s = 0.0

    def asked(self, now: float, sequence: int) -> None:
        """Records that a beat was handed to the connection. `sequence` grows."""
        self._newest = sequence
        if len(self._unanswered) < MAX_UNANSWERED:
            self._unanswered.append((sequence, now))

    def answered(self, now: float, sequence: int) -> None:
        """Records that the node received this beat and all earlier ones.

        An answer to a beat that was never sent is ignored.
        """
        if sequence > self._newest:
            return
        self._answered_at = now
        while self._unanswered and self._unanswered[0][0] <= sequence:
            asked_at = self._unanswered.popleft()[1]
            if not self._excused:
                self._measure(asked_at, now)
        self._excused = False

    def excuse(self, now: float) -> None:
        """Excuses late answers after this router stood still.

        Until the router has read the next answer, it has not read everything that waits in its
        socket. That time is not a round trip.
        """
        if self._answered_at is not None:
            self._answered_at, self._excused = now + BACKLOG_S, True

    def _measure(self, asked_at: float, now: float) -> None:
        """Measures one round trip at a time, as in RFC 6298.

        A pause thus does not count once for each beat that was sent during it.
        """
        if asked_at >= self._measured_at:
            self._measured_at, self._last_s = now, now - asked_at
            # One long delay must not hide the next: a time far beyond suspicion is clipped before
            # it is learned.
            self._round_trips.add(min(self._last_s, 2 * self._round_trips.silence_s(self._thresholds.suspect_phi)))

    @property
    def awaited(self) -> bool:
        """Whether beats are unanswered."""
        return bool(self._unanswered)

    @property
    def suspect_at(self) -> float:
        since = self.unanswered_since
        return since if since == math.inf else since + self._silence_s(self._thresholds.suspect_phi)

    @property
    def dead_at(self) -> float:
        since = self.unanswered_since
        if since == math.inf:
            return since
        return since + self._silence_s(self._thresholds.dead_phi) + 2 * self._thresholds.grace_s

    @property
    def unanswered_since(self) -> float:
        """Infinite while no beat is unanswered."""
        if self._answered_at is None or not self._unanswered:
            return math.inf
        asked_at = self._unanswered[0][1]
        return asked_at if asked_at > self._answered_at else self._answered_at

    def _silence_s(self, phi: float) -> float:
        """Returns the silence for `phi`, extended by the excess of the last round trip.

        A path that has just become slower is then not suspected repeatedly until the window has
        learned it.
        """
        return self._round_trips.silence_s(phi) + max(0.0, self._last_s - self._round_trips.mean_s)


class Progress:
    """Judges whether pending work moves.

    The node's own watchdog does so too; this class works even if that one is stuck.
    """

    def __init__(self, thresholds: PhiThresholds) -> None:
        self._thresholds = thresholds
        self._step = -1
        self._moved_at: float | None = None
        self._step_s = 0.0
        self._unseen_s = 0.0

    def beat(self, now: float, step: int, pending: bool, *, profiling: bool = False, unseen_s: float = 0.0) -> None:
        """Records the progress that a beat reports.

        `step` counts the engine's steps; `pending`: sequences run or wait; `profiling`: the node
        reports why nothing moves. `unseen_s`: how long what moves may go unreported, on a quiet stream.
        """
        self._unseen_s = unseen_s
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
        """When the work counts as stalled if nothing moves until then; infinite without work."""
        if self._moved_at is None:
            return math.inf
        return self._moved_at + max(self._thresholds.stall_s, self._thresholds.stall_steps * self._step_s) + self._unseen_s

    def expect(self, now: float) -> None:
        """Records that from now on the node reports often again, after a time in which what moved went unreported."""
        self._moved_at, self._unseen_s = None if self._moved_at is None else now, 0.0
