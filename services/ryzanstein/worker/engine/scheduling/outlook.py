"""Predicts when waiting sequences get their first token.

The prediction uses the measured pace and what is ahead of each sequence. A wait has two causes:
places in the batch (one becomes free whenever a sequence ends) and prompts (only so many tokens fit
a step). The longer of the two counts, then the sequence's own prompt. Before anything has ended
there is no estimate: the prediction is then 0, which is optimistic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ryzanstein.worker.engine.accounts import DECODE_WEIGHT, PREFILL_WEIGHT
from ryzanstein.worker.engine.scheduling.pace import StepPace
from ryzanstein.worker.engine.scheduling.scheduler import Scheduler
from ryzanstein.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wait:
    """What a waiting sequence may expect, in seconds from now.

    `finish_s` is the time until its last token. For a sequence that need not wait for a place it is
    `first_token_s`: refusing it gains nothing, however long its answer is.
    """

    sequence: Sequence
    first_token_s: float
    finish_s: float


class Outlook:
    """A view of the queue at one moment. The queue must not change while `waits` is read."""

    def __init__(self, scheduler: Scheduler, pace: StepPace) -> None:
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
        return Wait(sequence, first_token_s, first_token_s + answer_s)

    def _places_s(self, num_wanted: int) -> float:
        """Returns the time until so many places are free, including those that are free now."""
        if num_wanted < 1:
            return 0.0
        rounds, i = divmod(num_wanted - 1, len(self._free_in))
        return self._pace.step_s * (self._free_in[i] + rounds * self._pace.mean_length)


def _free_in(scheduler: Scheduler, pace: StepPace) -> list[float]:
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
