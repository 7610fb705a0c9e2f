"""Refuses early what would come too late, before work is wasted on it.

That concerns deadlines and the latency objective. An answer that would be cut off by its deadline
is wasted work for everything behind it: under load, serving each request just until it is late
serves nobody. So a deadline must leave time for the whole answer, judged by the recent length of
answers.

The queue is examined when a group has joined it, and at intervals. Only groups for which no work
was done are refused: neither those that were paused nor continuations, whose clients are already
reading.
"""

from __future__ import annotations

import math

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.engine.scheduling.outlook import Outlook, Wait
from ryzanstein.worker.engine.scheduling.pace import StepPace
from ryzanstein.worker.engine.scheduling.scheduler import Scheduler
from ryzanstein.worker.engine.sequence import Group
from ryzanstein.worker.engine.settings import EngineSettings

LOOK_EVERY_S = 0.02
# A group that joins must have a fifth of the objective to spare: estimates may be wrong by that
# much before a group that was accepted is refused.
HEADROOM = 0.8
LEAST_RETRY_S, LONGEST_RETRY_S = 0.05, 60.0


class Shedding:
    """Load shedding: `late` returns the groups to refuse."""

    def __init__(self, settings: EngineSettings, scheduler: Scheduler, pace: StepPace) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._pace = pace
        self._objective_s = settings.ttft_objective_s or math.inf
        self._next_look = 0.0
        self._newcomer_s = 0.0

    @property
    def newcomer_s(self) -> float:
        """Returns the last predicted wait of a sequence that would join the end of the queue."""
        return self._newcomer_s if self._scheduler.waiting else 0.0

    @property
    def retry_after_s(self) -> float:
        """Returns the time until a place in the queue is free; one second if nothing is known."""
        return _bounded(self._pace.release_s(len(self._scheduler.running)) if self._pace.mean_length else 1.0)

    def joined(self) -> None:
        """Notes that a group has joined the queue since the last examination."""
        self._next_look = 0.0

    def late(self, now: float) -> list[tuple[Group, RyzansteinError]]:
        """Returns the groups to refuse, and why. Empty between two examinations."""
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_EVERY_S
        if not self._pace.known:
            return []
        return self._look(now)

    def _look(self, now: float) -> list[tuple[Group, RyzansteinError]]:
        outlook = Outlook(self._scheduler, self._pace)
        late = []
        for wait in outlook.waits():
            group = wait.sequence.group
            error = self._judge(group, wait, now) if group.fresh else None
            if error is not None:
                late.append((group, error))
                outlook.skip(wait.sequence)
        self._newcomer_s = outlook.newcomer_s
        return late

    def _judge(self, group: Group, wait: Wait, now: float) -> RyzansteinError | None:
        left_s = math.inf if group.message.deadline is None else group.message.deadline - now
        if wait.finish_s > left_s:
            return errors.deadline_unreachable(wait.finish_s, left_s, _bounded(wait.finish_s - left_s))
        expected_s = now - group.arrived + wait.first_token_s
        allowed_s = self._objective_s * (1.0 if group.accepted else HEADROOM)
        if expected_s > allowed_s:
            return errors.too_busy(expected_s, self._objective_s, _bounded(expected_s - allowed_s))
        group.accepted = True
        return None


def _bounded(retry_s: float) -> float:
    return min(max(retry_s, LEAST_RETRY_S), LONGEST_RETRY_S)
