"""The generations that can be read: running ones and, for the re-attach window, ended ones.

A generation runs for the grace period after its last reader left; then it is paused. At the end of
the window it is cancelled. A generation that has ended is forgotten at the end of the window, or
earlier when the ended ones hold more tokens than the limit.

Readers are notified of new tokens a few per loop iteration. If all readers were notified at once, each
frame would wait until every reader has had its message. Under load the frames would pile up unread, and
each token would be sent alone and late. With a few readers at a time, frames are read in between, and
what has arrived meanwhile goes into one message: load makes messages larger, not the wait longer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from ryzanstein import errors
from ryzanstein.process.awake import AwakeClock, AwakeQueue
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.generations.measures import GenerationMeasures
from ryzanstein.router.telemetry import RouterTelemetry

READERS_PER_TURN = 4


class ReaderWakeups:
    """The readers of all generations that have something new to read, in order of arrival."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[asyncio.Event, None] = {}

    def add(self, readers: Iterable[asyncio.Event]) -> None:
        if not self._due:
            self._loop.call_soon(self._turn)
        for reader in readers:
            self._due[reader] = None

    def _turn(self) -> None:
        due = self._due
        for reader in [reader for reader, _ in zip(due, range(READERS_PER_TURN), strict=False)]:
            del due[reader]
            reader.set()
        if due:
            self._loop.call_soon(self._turn)


UnreadTurns = Literal["keep", "drop"]
"""What a session keeps of an answer that is ended because it has no reader.

Either what was shown of it, or nothing.
"""


@dataclass(frozen=True, slots=True)
class ReadingWindow:
    """The bounds within which generations can be read, in seconds and tokens.

    `grace_s` is how long a generation runs without a reader. `reattach_s` is how long a client can
    come back to it. `max_retained_tokens` is how many tokens of ended generations are retained for
    that.
    """

    grace_s: float
    reattach_s: float
    max_retained_tokens: int


class RetainedGenerations:
    """Generations by id.

    `pause` is called with a generation that has had no reader for the grace period. `abandon` is
    called with one that no reader came back to, which must be dropped when it has ended.
    `on_forgotten` is called with each one that is dropped. `measures` are of all of them.
    """

    def __init__(
        self,
        window: ReadingWindow,
        pause: Callable[[Generation], None],
        abandon: Callable[[Generation], None],
        on_forgotten: Callable[[Generation], None],
        telemetry: RouterTelemetry,
        *,
        awake: AwakeClock,
    ) -> None:
        self._window = window
        self._pause = pause
        self._abandon = abandon
        self._on_forgotten = on_forgotten
        self._telemetry = telemetry
        self._awake = awake
        self.measures = GenerationMeasures(telemetry)
        self._wakeups = ReaderWakeups()
        self._by_id: dict[str, Generation] = {}
        self._retained: dict[str, int] = {}
        self._retained_tokens = 0
        self._unread = AwakeQueue(awake, self._grace_over)
        self._expiring = AwakeQueue(awake, self._expire)
        self._expiring_after_grace = AwakeQueue(awake, self._expire)
        self._waiting: Counter[str] = Counter()

    def waiting(self, model: str) -> int:
        """Returns how many generations of the model no node has accepted yet."""
        return self._waiting[model]

    def add(self, generation: Generation) -> None:
        """Adds a generation. Its window starts at once, because a client may never read it."""
        self._by_id[generation.generation_id] = generation
        self._waiting[generation.request.model] += 1
        self._telemetry.running.inc()
        self._telemetry.waiting.inc()
        self.readers_changed(generation)

    def find(self, generation_id: str) -> Generation | None:
        return self._by_id.get(generation_id)

    def get(self, generation_id: str) -> Generation:
        """Returns a generation. Raises NOT_FOUND when there is none."""
        generation = self.find(generation_id)
        if generation is None:
            raise errors.not_found("generation", generation_id)
        return generation

    def readers_changed(self, generation: Generation) -> None:
        """Restarts or stops a generation's timer, because a reader came or left."""
        if generation.generation_id not in self._by_id:
            return
        self._stop_waiting(generation.generation_id)
        if generation.num_readers or (generation.request.detached and not generation.settled):
            return
        # While this router is paused no client can come back to it.
        now, window = self._awake.now(), self._window
        if generation.settled or window.grace_s >= window.reattach_s:
            self._expiring.add(generation.generation_id, now + window.reattach_s)
        else:
            self._unread.add(generation.generation_id, now + window.grace_s)

    def _grace_over(self, generation_id: str) -> None:
        left_s = self._window.reattach_s - self._window.grace_s
        self._expiring_after_grace.add(generation_id, self._awake.now() + left_s)
        self._pause(self._by_id[generation_id])

    def _waits(self, generation_id: str) -> bool:
        return generation_id in self._unread or generation_id in self._expiring or generation_id in self._expiring_after_grace

    def _stop_waiting(self, generation_id: str) -> None:
        self._unread.discard(generation_id)
        self._expiring.discard(generation_id)
        self._expiring_after_grace.discard(generation_id)

    def has_news(self, readers: Collection[asyncio.Event]) -> None:
        self._wakeups.add(readers)

    def generation_started(self, generation: Generation) -> None:
        self._no_longer_waits(generation)
        if generation.started is not None:
            self._telemetry.prompts.started(generation.request.model, generation.started)

    def first_token(self, generation: Generation) -> None:
        self.measures.first_token(generation)

    def _no_longer_waits(self, generation: Generation) -> None:
        self._waiting[generation.request.model] -= 1
        self._telemetry.waiting.dec()

    def ended(self, generation: Generation) -> None:
        """Retains an ended generation for the rest of its window.

        The window of a detached generation begins only now.
        """
        self._telemetry.running.dec()
        if generation.started is None:
            self._no_longer_waits(generation)
        if generation.generation_id not in self._by_id or generation.abandoned:
            return
        self._retained[generation.generation_id] = 1 + generation.log.num_tokens
        self._retained_tokens += 1 + generation.log.num_tokens
        if not self._waits(generation.generation_id):
            self.readers_changed(generation)
        while self._retained_tokens > self._window.max_retained_tokens:
            self._telemetry.evicted.inc()
            oldest = self._by_id[next(iter(self._retained))]
            (self._abandon if oldest.paused else self.drop)(oldest)
        self._telemetry.retained.set(len(self._retained))

    def resumed(self, generation: Generation) -> None:
        """Counts a generation that had ended as running again."""
        self._telemetry.running.inc()
        if generation.started is None:
            self._waiting[generation.request.model] += 1
            self._telemetry.waiting.inc()
        self._retained_tokens -= self._retained.pop(generation.generation_id, 0)
        self._telemetry.retained.set(len(self._retained))

    def drop(self, generation: Generation) -> None:
        """Removes a generation: it can no longer be read here. Its present readers get its end."""
        if generation.generation_id in self._by_id:
            self._forget(generation.generation_id)
            self._telemetry.retained.set(len(self._retained))

    def close(self) -> None:
        for queue in (self._unread, self._expiring, self._expiring_after_grace):
            queue.close()

    def _expire(self, generation_id: str) -> None:
        generation = self._by_id[generation_id]
        if generation.settled and not generation.paused:
            self.drop(generation)
            return
        self._telemetry.unread.abandoned.inc()
        self._abandon(generation)

    def _forget(self, generation_id: str) -> None:
        generation = self._by_id.pop(generation_id)
        self._retained_tokens -= self._retained.pop(generation_id, 0)
        self._stop_waiting(generation_id)
        self._on_forgotten(generation)
