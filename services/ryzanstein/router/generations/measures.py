"""What is measured of each generation: at its first token and at its end, never for each token between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import structlog

from ryzanstein.observe.tracing import recorded_trace
from ryzanstein.router.generations.generation import STAGES, Generation
from ryzanstein.router.telemetry import RouterTelemetry

_OUTCOMES = (
    "complete",
    "cancelled",
    "internal",
    "unavailable",
    "deadline_exceeded",
    "unknown",
    "data_loss",
    "resource_exhausted",
)

log = structlog.get_logger(__name__)


class GenerationMeasures:
    """Observes generations, and logs at the end of each what its time was spent on.

    The waits of one that another router began are that router's to tell.
    """

    def __init__(self, telemetry: RouterTelemetry) -> None:
        self._telemetry = telemetry
        self._models: set[str] = set()
        self._stages = {stage: telemetry.times.stage.labels(stage) for stage in STAGES}

    def watch(self, running: Collection[Generation]) -> None:
        """Shows the longest waits among these generations, at each scrape."""
        waits = self._telemetry.times
        waits.oldest.set_function(_longest(running, lambda each: each.times.submitted_at))
        waits.unanswered.set_function(
            _longest(running, lambda each: not each.times.first_token_at and each.times.last_token_at)
        )
        waits.silent.set_function(_longest(running, lambda each: each.times.first_token_at and each.times.last_token_at))

    def began(self, generation: Generation) -> None:
        """Shows how many generations of its model ended in each way, so that `increase()` sees the first one that failed."""
        if (model := generation.request.model) not in self._models:
            self._models.add(model)
            for outcome in _OUTCOMES:
                self._telemetry.generations.labels(model, outcome)

    def first_token(self, generation: Generation) -> None:
        """Observes how long the first token took. It shows while the answer goes on, and if it fails."""
        if generation.epoch:
            return
        times = generation.times
        took_s = times.first_token_at - times.submitted_at
        self._telemetry.times.first_token.labels(generation.request.model).observe(took_s, _exemplar(generation))
        for stage, took_s in times.stages_s().items():
            self._stages[stage].observe(took_s)

    def ended(self, generation: Generation, outcome: str) -> None:
        """Observes the generation as a whole, and logs it."""
        model, times, tokens = generation.request.model, generation.times, generation.log.num_tokens
        duration_s = time.monotonic() - times.submitted_at
        self._telemetry.generations.labels(model, outcome).inc()
        self._telemetry.tenants.ended(generation.request.tenant, outcome)
        self._telemetry.times.duration.labels(model).observe(duration_s)
        if times.first_token_at:
            self._telemetry.times.longest_pause.labels(model).observe(times.longest_pause_s, _exemplar(generation))
        if times.first_token_at and not generation.epoch and tokens > 1:
            self._telemetry.times.per_token.labels(model).observe((times.last_token_at - times.first_token_at) / (tokens - 1))
        if not log.is_enabled_for(logging.INFO):
            return
        stages = {} if generation.epoch else {f"{stage}_s": round(took_s, 6) for stage, took_s in times.stages_s().items()}
        log.info(
            "generation ended",
            model=model,
            outcome=outcome,
            tokens=tokens,
            attempts=generation.num_attempts,
            duration_s=round(duration_s, 6),
            **stages,
            longest_pause_s=round(times.longest_pause_s, 6),
            request_id=generation.request.request_id,
            generation_id=generation.generation_id,
        )


def _exemplar(generation: Generation) -> dict[str, str] | None:
    """Returns what leads from a measurement to its trace (OpenMetrics); None: the generation is not traced."""
    trace_id = recorded_trace(generation.request.traceparent)
    return {"trace_id": trace_id} if trace_id else None


def _longest(running: Collection[Generation], since: Callable[[Generation], float]) -> Callable[[], float]:
    """Returns what tells the longest time since `since`, which is 0 for generations that do not count."""

    def longest() -> float:
        generations = list(running)  # at once: a scrape has a thread of its own
        first = min((at for each in generations if not each.log.complete and (at := since(each))), default=0.0)
        return time.monotonic() - first if first else 0.0

    return longest
