"""Where a request of this router is, for operators who look for one that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ryzanstein.observe.requests import FoundRequest, RequestStage
from ryzanstein.router.generations.generation import Generation, RunningAttempt


class Arrivals:
    """Requests that no generation stands for: not yet, or never."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[RequestStage, str, str, float]] = {}

    @contextmanager
    def during(self, stage: RequestStage, number: str, request_id: str, model: str) -> Iterator[None]:
        """Makes a request found while a block runs. `number` is that of its generation, or another one that no request has."""
        self._begun[number] = stage, request_id, model, time.monotonic()
        try:
            yield
        finally:
            del self._begun[number]

    def __iter__(self) -> Iterator[FoundRequest]:
        now = time.monotonic()
        for number, (stage, request_id, model, began_at) in self._begun.items():
            yield FoundRequest(request_id, number, model, stage, now - began_at, now - began_at, 0, "", 0)


def found(generation: Generation) -> FoundRequest:
    """Returns where the generation is. Of two attempts the newer one counts."""
    times = generation.times
    attempt = max(generation.attempts, key=lambda each: each.attempt, default=None)
    moved_at = times.last_token_at if attempt is None else max(times.last_token_at, attempt.moved_at)
    now = time.monotonic()
    return FoundRequest(
        generation.request.request_id,
        generation.generation_id,
        generation.request.model,
        _stage(generation, attempt),
        now - times.submitted_at,
        now - moved_at,
        generation.next_attempt if attempt is None else attempt.attempt,
        "" if attempt is None else attempt.node_id,
        generation.log.num_tokens,
        0 if generation.started is None else generation.started.prompt_tokens,
    )


def _stage(generation: Generation, attempt: RunningAttempt | None) -> RequestStage:
    if generation.paused:
        return RequestStage.PAUSED
    if generation.log.complete:
        return RequestStage.STORING
    if attempt is None:
        return RequestStage.WAITING
    if not attempt.was_accepted:
        return RequestStage.SENT
    return RequestStage.DECODE if attempt.fruitful else RequestStage.PREFILL
