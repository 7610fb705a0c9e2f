"""When those who wait will have their first token, judged by the measured pace and by what is ahead of each.

A wait has two causes: places in the batch (one more is free whenever a sequence ends) and prompts (so many tokens fit a step).
The longer of the two counts, then the sequence's own prompt. No estimate before anything was measured: 0 then, an optimist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ryzanstein.worker.engine.accounts import DECODE_WEIGHT, PREFILL_WEIGHT
from ryzanstein.worker.engine.pace import Pace
from ryzanstein.worker.engine.scheduler import Scheduler
from ryzanstein.worker.engine.sequence import Sequence
from ryzanstein.worker.engine.settings import EngineSettings


class Outlook:
    """A view of the line at one moment; the line must not change while `waits` is read."""

    def __init__(self, settings: EngineSettings, scheduler: Scheduler, pace: Pace) -> None:
        self._scheduler = scheduler
        self._pace = pace
        self._room = scheduler.prefill_room
        self._running = Counter(sequence.group.priority for sequence in scheduler.running)
        self._num_free = 0 if scheduler.out_of_room else settings.max_sequences - len(scheduler.running)
        self._prefill_ahead = sum(s.num_pending for s in scheduler.running if s.num_pending > 1)
        self._num_ahead = 0

    def waits(self) -> Iterator[tuple[Sequence, float]]:
        """Each that waits, in turn, and seconds until its first token. `skip` one that will not take its place."""
        charge = DECODE_WEIGHT * self._pace.mean_length + PREFILL_WEIGHT * self._scheduler.mean_uncached
        for sequence in self._scheduler.waiting.in_turn(charge):
            self._num_ahead += 1
            num_tokens = self._scheduler.num_uncached(sequence)
            yield sequence, self._until_start(sequence) + self._pace.prefill_s(num_tokens, self._room)
            self._prefill_ahead += num_tokens

    def skip(self, sequence: Sequence) -> None:
        """The one that `waits` gave last does not stay."""
        self._num_ahead -= 1
        self._prefill_ahead -= self._scheduler.num_uncached(sequence)

    @property
    def newcomer_s(self) -> float:
        """How long one that joins the end of the line would wait for its place."""
        return max(self._places_s(self._num_ahead + 1), self._pace.prefill_s(self._prefill_ahead, self._room))

    def _until_start(self, sequence: Sequence) -> float:
        lower = sum(num for priority, num in self._running.items() if priority < sequence.group.priority)
        return max(self._places_s(self._num_ahead - lower), self._pace.prefill_s(self._prefill_ahead, self._room))

    def _places_s(self, num_wanted: int) -> float:
        return max(0, num_wanted - self._num_free) * self._pace.release_s(len(self._scheduler.running))
