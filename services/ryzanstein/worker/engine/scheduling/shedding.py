"""Refuses early what would come too late, before work is wasted on it.

That concerns deadlines and the latency objective. An answer that would be cut off by its deadline
is wasted work for everything behind it: under load, serving each request just until it is late
serves nobody. So a deadline must leave time for the whole answer, judged by the recent length of
answers.

The queue is examined when a group has joined it, and at intervals. Only groups for which no work
was done are refused: neither those that were paused nor continuations, whose clients are already
reading.

When a waiting sequence gets its first token is predicted. The prediction uses the measured pace and
what is ahead of each sequence. A wait has two causes: places in the batch (one becomes free whenever a
sequence ends) and prompts (only so many tokens fit a step). The longer of the two counts, then the
sequence's own prompt. Before anything has ended there is no estimate: the prediction is then 0, which
is optimistic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.scheduling.pace import StepPace
from ryzanstein.worker.engine.scheduling.places import SequenceScheduler
from ryzanstein.worker.engine.sequence import DECODE_WEIGHT, PREFILL_WEIGHT, Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Wait:
    """What a waiting sequence may expect, in seconds from now.

    `start_s` is the time until the first step that computes its prompt, `finish_s` that until its last token. For
    a sequence that need not wait for a place the latter is `first_token_s`: refusing it gains nothing, however
    long its answer is.
    """

    sequence: Sequence
    start_s: float
    first_token_s: float
    finish_s: float


class WaitForecast:
    """A view of the queue at one moment. The queue must not change while `waits` is read."""

    def __init__(self, scheduler: SequenceScheduler, pace: StepPace) -> None:
        self._scheduler = scheduler
        self._pace = pace
        self._room = scheduler.prefill_room
        self._running = Counter(sequence.group.priority for sequence in scheduler.running)
        self._prefill_ahead = sum(s.num_pending for s in scheduler.running if s.num_pending > 1)
        self._num_ahead = 0
        self._free_in = _free_in(scheduler, pace)

    def waits(self) -> Iterator[Wait]:
        """Yields the prediction for each waiting sequence, in turn.

        `skip` a sequence that will not take its place.
        """
        charge = DECODE_WEIGHT * self._pace.mean_length + PREFILL_WEIGHT * self._scheduler.mean_uncached
        for sequence in self._scheduler.waiting.in_turn(charge):
            self._num_ahead += 1
            yield self._wait(sequence)
            self._prefill_ahead += self._scheduler.num_uncached(sequence)

    def skip(self, sequence: Sequence) -> None:
        """Removes the sequence that `waits` yielded last from the prediction."""
        self._num_ahead -= 1
        self._prefill_ahead -= self._scheduler.num_uncached(sequence)

    @property
    def newcomer_s(self) -> float:
        """Returns how long a sequence that joins the end of the queue would wait for its place."""
        return max(self._places_s(self._num_ahead + 1), self._pace.prefill_s(self._prefill_ahead, self._room))

    def _wait(self, sequence: Sequence) -> Wait:
        lower = sum(num for priority, num in self._running.items() if priority < sequence.group.priority)
        place_s = self._places_s(self._num_ahead - lower)
        start_s = max(place_s, self._pace.prefill_s(self._prefill_ahead, self._room))
        first_token_s = start_s + self._pace.prefill_s(self._scheduler.num_uncached(sequence), self._room)
        answer_s = self._pace.step_s * self._pace.mean_share * sequence.num_allowed if place_s else 0.0
        return Wait(sequence, start_s, first_token_s, first_token_s + answer_s)

    def _places_s(self, num_wanted: int) -> float:
        """Returns the time until so many places are free, including those that are free now."""
        if num_wanted < 1:
            return 0.0
        rounds, i = divmod(num_wanted - 1, len(self._free_in))
        return self._pace.step_s * (self._free_in[i] + rounds * self._pace.mean_length)


def _free_in(scheduler: SequenceScheduler, pace: StepPace) -> list[float]:
    """Returns the steps until the first, second, ... of the places becomes free.

    The result is between two extremes, depending on how irregular lengths are. A sequence of the
    usual length ends when that length is reached. One that ends by chance may do so in any step,
    whatever its age, and then ends are spread evenly.
    """
    num_places = max(scheduler.num_places, len(scheduler.running))
    left = [max(0.0, pace.mean_share * (s.num_allowed + s.num_begun) - s.num_begun) for s in scheduler.running]
    left = [0.0] * (num_places - len(left)) + sorted(left)
    chance, num_free = pace.irregularity, num_places - len(scheduler.running)
    evenly = pace.mean_length / num_places
    return [(1 - chance) * steps + chance * evenly * max(0, i + 1 - num_free) for i, steps in enumerate(left)]


LOOK_EVERY_S = 0.02
# A group that joins must have a fifth of the objective to spare: estimates may be wrong by that
# much before a group that was accepted is refused. Who waits less than that fifth is not refused: a prompt
# that alone takes longer than the objective would be refused for ever, on an idle node too.
HEADROOM = 0.8
LEAST_RETRY_S, LONGEST_RETRY_S = 0.05, 60.0


class Shedding:
    """Load shedding: `late` returns the groups to refuse."""

    def __init__(self, settings: EngineSettings, scheduler: SequenceScheduler, pace: StepPace) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._pace = pace
        self._objective_s = settings.queue.ttft_objective_s or math.inf
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

    def late(self, now: float) -> list[tuple[SequenceGroup, RyzansteinError]]:
        """Returns the groups to refuse, and why. Empty between two examinations."""
        if now < self._next_look:
            return []
        self._next_look = now + LOOK_EVERY_S
        if not self._pace.known:
            return []
        return self._look(now)

    def _look(self, now: float) -> list[tuple[SequenceGroup, RyzansteinError]]:
        forecast = WaitForecast(self._scheduler, self._pace)
        late = []
        for wait in forecast.waits():
            group = wait.sequence.group
            error = self._judge(group, wait, now) if group.fresh else None
            if error is not None:
                late.append((group, error))
                forecast.skip(wait.sequence)
        self._newcomer_s = forecast.newcomer_s
        return late

    def _judge(self, group: SequenceGroup, wait: Wait, now: float) -> RyzansteinError | None:
        left_s = math.inf if group.message.deadline is None else group.message.deadline - now
        if wait.finish_s > left_s:
            return errors.deadline_unreachable(wait.finish_s, left_s, _bounded(wait.finish_s - left_s))
        waited_s = now - group.arrived
        expected_s = waited_s + wait.first_token_s
        allowed_s = self._objective_s * (1.0 if group.accepted else HEADROOM)
        if expected_s > allowed_s and waited_s + wait.start_s > (1 - HEADROOM) * self._objective_s:
            return errors.too_busy(expected_s, self._objective_s, _bounded(expected_s - allowed_s))
        group.accepted = True
        return None


def _bounded(retry_s: float) -> float:
    return min(max(retry_s, LEAST_RETRY_S), LONGEST_RETRY_S)
