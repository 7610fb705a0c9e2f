"""Where a request of this router is, for operators who look for one that hangs."""

from __future__ import annotations

import time

from ryzanstein.observe.requests import FoundRequest, RequestStage
from ryzanstein.router.generations.generation import Generation, RunningAttempt


def found(generation: Generation) -> FoundRequest:
    """Returns where the generation is. Of two attempts the newer one counts."""
    times = generation.times
    attempt = max(generation.attempts, key=lambda each: each.attempt, default=None)
    moved_at = times.last_token_at if attempt is None else max(times.last_token_at, attempt.moved_at)
    now = time.monotonic()
    return FoundRequest(
        generation.request.request_id,
        generation.generation_id,
        generation.request.public_model,
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
