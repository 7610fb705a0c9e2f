"""Turns the detectors' judgement of one link into three levels, at the moment when they change.

There is one timer per link. It is set to the time of the next level if nothing arrives, so nothing
is polled.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from ryzanstein.cluster import Beat
from ryzanstein.process.awake import AwakeClock, AwakeTimer
from ryzanstein.router.nodes.links.phi_detector import (
    QUIET_INTERVAL_S,
    BeatDetector,
    BeatIntervals,
    BeatRate,
    Echoes,
    PhiThresholds,
    Progress,
)

SILENCE = "silence"
STALL = "stall"
# Its beats come, and it answers none of this router's.
DEAF = "deaf"
# This process must run before it sees beats that have arrived. So the timer looks several times; on
# a machine whose cores are busy, these looks take longer like everything else here.
_LOOKS = 3
_LOOK_AGAIN_S = 0.01
# One beat in ten is this late.
_LATE_PHI = 1.0


class SuspicionLevel(IntEnum):
    FINE = 0
    SUSPECT = 1
    DEAD = 2


class SuspicionWatch:
    """Watches one link. `start` it, feed it every beat and frame, and `close` it.

    It calls `on_level(level, cause)` on each change. Silence is measured in time in which this
    router ran.
    """

    def __init__(
        self,
        thresholds: PhiThresholds,
        on_level: Callable[[SuspicionLevel, str], None],
        awake: AwakeClock,
        intervals: BeatIntervals | None = None,
    ) -> None:
        self._awake = awake
        self._beats = BeatDetector(thresholds, awake.now(), intervals)
        self._progress = Progress(thresholds)
        self._echoes = Echoes(thresholds)
        self._on_level = on_level
        self._timer: AwakeTimer | None = None
        self._looking = False
        self._pauses = awake.pauses
        self.level = SuspicionLevel.FINE
        self.cause = ""

    def start(self) -> None:
        self._arm(self._next_change())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def punctual(self) -> bool:
        """Whether nothing is late, let alone suspect."""
        return self.level is SuspicionLevel.FINE and self._beats.phi(self._awake.now()) < _LATE_PHI

    def beat(self, beat: Beat) -> None:
        now = self._awake.now()
        working = beat.load.running + beat.load.waiting > 0
        rate = BeatRate.QUIET if beat.quiet else BeatRate.WORKING if working else BeatRate.IDLE
        # The intervals of a quiet stream are not learned: there a beat only postpones the next change.
        sooner = working or not rate is self._beats.rate is BeatRate.QUIET
        self._beats.beat(now, rate)
        unseen_s = QUIET_INTERVAL_S if beat.quiet else 0.0
        self._progress.beat(now, beat.step, working, profiling=beat.profiling, unseen_s=unseen_s)
        self._alive(now, sooner=sooner)

    def expect(self) -> None:
        """Records that the node was given work: if its stream is quiet, its beats come often again from now on."""
        if self._beats.rate is BeatRate.QUIET:
            now = self._awake.now()
            self._beats.expect(now)
            self._progress.expect(now)
            self._hasten()

    def frame(self) -> None:
        """Records the arrival of anything other than a beat."""
        now = self._awake.now()
        self._beats.sign(now)
        if self.level is not SuspicionLevel.FINE:
            self._alive(now)

    def asked(self, sequence: int) -> None:
        """Records that a beat of this router is on its way."""
        self._echoes.asked(self._awake.now(), sequence)
        self._hasten()

    def answered(self, sequence: int) -> None:
        """Records that the node received it."""
        now = self._awake.now()
        self._echoes.answered(now, sequence)
        self._alive(now, sooner=self._echoes.awaited)

    def _alive(self, now: float, *, sooner: bool = True) -> None:
        """Restores trust at once. `sooner`: the next change of the level may come before the timer.

        Only the timer raises suspicion, after it has looked again: the answer may be queued behind
        what was just read.
        """
        self._excuse(now)
        if self.level is not SuspicionLevel.FINE:
            level, cause = self._verdict(now)
            if level < self.level:
                self._judge(level, cause)
                sooner = True
        if sooner:
            self._hasten()

    def _hasten(self) -> None:
        # A repeated look keeps its time; otherwise whatever arrives meanwhile would postpone it
        # forever.
        if self._timer is not None and not self._looking and self._next_change() < self._timer.when:
            self._arm(self._next_change())

    def _next_change(self) -> float:
        if self.level is SuspicionLevel.FINE:
            return min(self._beats.suspect_at, self._echoes.suspect_at, self._progress.stalled_at)
        return min(self._beats.dead_at, self._echoes.dead_at)

    def _look_again(self, at: float, looks: int) -> None:
        self._arm(at, looks)
        self._looking = True

    def _arm(self, at: float, looks: int = 0) -> None:
        self.close()
        self._looking = False
        self._timer = self._awake.call_at(at, self._fire, looks)

    def _fire(self, looks: int) -> None:
        now = self._awake.now()
        level, cause = self._verdict(now)
        if level > self.level and looks < _LOOKS:
            self._look_again(now + _LOOK_AGAIN_S, looks + 1)
            return
        self._judge(level, cause)
        if self.level is not SuspicionLevel.DEAD:
            self._arm(max(self._next_change(), now + 0.001))

    def _judge(self, level: SuspicionLevel, cause: str) -> None:
        if level is not self.level:
            self.level, self.cause = level, cause
            self._on_level(level, cause)

    def _excuse(self, now: float) -> None:
        """Excuses late answers after each pause of this router."""
        if self._awake.pauses != self._pauses:
            self._pauses = self._awake.pauses
            self._echoes.excuse(now)

    def _verdict(self, now: float) -> tuple[SuspicionLevel, str]:
        self._excuse(now)
        if now >= self._beats.dead_at:
            return SuspicionLevel.DEAD, SILENCE
        if now >= self._echoes.dead_at:
            return SuspicionLevel.DEAD, self._unanswered(now)
        if now >= self._beats.suspect_at:
            return SuspicionLevel.SUSPECT, SILENCE
        if now >= self._echoes.suspect_at:
            return SuspicionLevel.SUSPECT, self._unanswered(now)
        if now >= self._progress.stalled_at:
            return SuspicionLevel.SUSPECT, STALL
        return SuspicionLevel.FINE, ""

    def _unanswered(self, now: float) -> str:
        """Returns DEAF if the node still sends but does not answer, else SILENCE.

        A node that stands still does not answer either, but also sends nothing.
        """
        return DEAF if self._beats.last_sign > (self._echoes.unanswered_since + now) / 2 else SILENCE
