"""The metrics of constraints on answers: how they are judged and compiled, and how they become masks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from ryzanstein.worker.constraints.refusal import Cause
from ryzanstein.worker.engine.messages import ConstraintStats
from ryzanstein.worker.text.grammars.verdicts import GrammarObserver


class GrammarMetrics:
    """What the process does that judges constraints, for all models of a node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.compile = Histogram(
            "ryzanstein_worker_grammar_compile_seconds",
            "CPU time to compile a constraint.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
            registry=registry,
        )
        self.refusals = Counter(
            "ryzanstein_worker_grammar_refusals_total", "Constraints refused, by cause.", ["cause"], registry=registry
        )
        self.verdicts = Counter(
            "ryzanstein_worker_grammar_verdicts_total",
            "Constraints looked up before a compile.",
            ["outcome"],
            registry=registry,
        )
        for cause in Cause:
            self.refusals.labels(cause.value)

    @property
    def observer(self) -> GrammarObserver:
        """Counts what the process does."""
        return GrammarObserver(
            self.compile.observe,
            lambda cause: self.refusals.labels(cause.value).inc(),
            lambda known: self.verdicts.labels("hit" if known else "miss").inc(),
        )


class ConstraintMetrics:
    """What rank 0 of one model does for constraints."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        self.grammars = counter("grammars_total", "Compiled constraints looked up on rank 0.", "outcome")
        self.evictions = counter("grammar_evictions_total", "Compiled constraints dropped for lack of room.")
        self.mask_time = counter("mask_seconds_total", "Time to compute token masks, beside the steps.")
        self.mask_wait = counter("mask_wait_seconds_total", "Time that steps waited for token masks.")

    def count(self, now: ConstraintStats, old: ConstraintStats) -> None:
        """Adds what rank 0 counted since the `old` statistics."""
        self.grammars.labels("hit").inc(now.grammar_hits - old.grammar_hits)
        self.grammars.labels("miss").inc(now.grammar_misses - old.grammar_misses)
        self.evictions.inc(now.grammar_evictions - old.grammar_evictions)
        self.mask_time.inc(now.mask_s - old.mask_s)
        self.mask_wait.inc(now.wait_s - old.wait_s)
