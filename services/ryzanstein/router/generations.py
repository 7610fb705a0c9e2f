"""The generations that can be read: those that run, and for the re-attach window those that have ended.

A generation goes on without a reader for that window after the last one left, then it is cancelled; one that has ended is then
forgotten, and earlier when the ended ones hold more tokens than there is room for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from ryzanstein import errors
from ryzanstein.awake import AwakeClock, AwakeTimer
from ryzanstein.router.generation_state import Generation
from ryzanstein.router.telemetry import Telemetry
from ryzanstein.router.wakes import Wakes


class Generations:
    """Generations by id. `cancel` is called with one that nobody came back to, `on_forgotten` with each that is dropped."""

    def __init__(
        self,
        window_s: float,
        max_retained_tokens: int,
        cancel: Callable[[Generation], None],
        on_forgotten: Callable[[Generation], None],
        telemetry: Telemetry,
        *,
        awake: AwakeClock,
    ) -> None:
        self._window_s = window_s
        self._max_retained_tokens = max_retained_tokens
        self._cancel = cancel
        self._on_forgotten = on_forgotten
        self._telemetry = telemetry
        self._awake = awake
        self._wakes = Wakes()
        self._by_id: dict[str, Generation] = {}
        self._retained: dict[str, int] = {}
        self._retained_tokens = 0
        self._timers: dict[str, AwakeTimer] = {}
        self._waiting: Counter[str] = Counter()

    def waiting(self, model: str) -> int:
        """How many no node has accepted yet."""
        return self._waiting[model]

    def add(self, generation: Generation) -> None:
        """The window starts at once: a client may never come to read."""
        self._by_id[generation.generation_id] = generation
        self._waiting[generation.request.model] += 1
        self._telemetry.running.inc()
        self._telemetry.waiting.inc()
        self.readers_changed(generation)

    def find(self, generation_id: str) -> Generation | None:
        return self._by_id.get(generation_id)

    def get(self, generation_id: str) -> Generation:
        """NOT_FOUND when there is none."""
        generation = self.find(generation_id)
        if generation is None:
            raise errors.not_found("generation", generation_id)
        return generation

    def readers_changed(self, generation: Generation) -> None:
        """A reader came or left."""
        generation_id = generation.generation_id
        if generation_id not in self._by_id:
            return
        if (timer := self._timers.pop(generation_id, None)) is not None:
            timer.cancel()
        if not generation.num_readers:
            # While this router stands still nobody can come back to it.
            self._timers[generation_id] = self._awake.call_at(self._awake.now() + self._window_s, self._expire, generation)

    def has_news(self, readers: Collection[asyncio.Event]) -> None:
        self._wakes.add(readers)

    def generation_started(self, generation: Generation) -> None:
        self._no_longer_waits(generation)
        if generation.started is not None:
            self._telemetry.prompt_tokens.labels(generation.request.model).inc(generation.started.prompt_tokens)

    def _no_longer_waits(self, generation: Generation) -> None:
        self._waiting[generation.request.model] -= 1
        self._telemetry.waiting.dec()

    def ended(self, generation: Generation) -> None:
        """It stays readable for what is left of its window."""
        self._telemetry.running.dec()
        if generation.started is None:
            self._no_longer_waits(generation)
        if generation.generation_id not in self._by_id:
            return
        self._retained[generation.generation_id] = 1 + generation.log.num_tokens
        self._retained_tokens += 1 + generation.log.num_tokens
        while self._retained_tokens > self._max_retained_tokens:
            self._telemetry.evicted.inc()
            self._forget(next(iter(self._retained)))
        self._telemetry.retained.set(len(self._retained))

    def resumed(self, generation: Generation) -> None:
        """One that had ended runs again."""
        self._telemetry.running.inc()
        if generation.started is None:
            self._waiting[generation.request.model] += 1
            self._telemetry.waiting.inc()
        self._retained_tokens -= self._retained.pop(generation.generation_id, 0)
        self._telemetry.retained.set(len(self._retained))

    def drop(self, generation: Generation) -> None:
        """It can no longer be read here. Its present readers get its end."""
        if generation.generation_id in self._by_id:
            self._forget(generation.generation_id)
            self._telemetry.retained.set(len(self._retained))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _expire(self, generation: Generation) -> None:
        if not generation.settled:
            self._telemetry.abandoned.inc()
            self._cancel(generation)
        self._forget(generation.generation_id)
        self._telemetry.retained.set(len(self._retained))

    def _forget(self, generation_id: str) -> None:
        generation = self._by_id.pop(generation_id)
        self._retained_tokens -= self._retained.pop(generation_id, 0)
        if (timer := self._timers.pop(generation_id, None)) is not None:
            timer.cancel()
        self._on_forgotten(generation)
