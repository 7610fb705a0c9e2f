"""The metrics of a node as a whole, whatever models it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter

from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.metrics import new_registry, show_service
from ryzanstein.process.background import Background
from ryzanstein.process.loop_lag import LoopLag
from ryzanstein.worker.telemetry.constraint_metrics import GrammarMetrics
from ryzanstein.worker.text.templates.rendering import RenderLimit


class NodeEmbeddingMetrics:
    """The metrics of vectors that a node is asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "ryzanstein_worker_embedding_{}".format
        self.calls = Counter(name("calls_total"), "Calls for vectors, by outcome.", ("outcome",), registry=registry)
        self.inputs = Counter(name("inputs_total"), "Inputs whose vectors were computed.", registry=registry)
        self.input_tokens = Counter(name("tokens_total"), "Tokens of these inputs.", registry=registry)
        for outcome in ("ok", "cancelled", "no_embeddings", "queue_full"):
            self.calls.labels(outcome)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call by how it ends."""
        outcome = "internal"
        try:
            yield
            outcome = "ok"
        except RyzansteinError as error:
            outcome = error.reason.lower()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.calls.labels(outcome).inc()


class NodeMetrics:
    """The metrics of the process and of what the models of a node share. They have no label `model`."""

    def __init__(self) -> None:
        self.registry = registry = new_registry()
        self.background = Background("worker", registry)
        show_service("worker", registry)
        self.loop_lag = LoopLag("worker", registry)
        self.grammars, self.embeddings = GrammarMetrics(registry), NodeEmbeddingMetrics(registry)
        self.template_limits = Counter(
            "ryzanstein_worker_template_limits_total",
            "Chats whose template exceeded a limit.",
            ["limit"],
            registry=registry,
        )
        self.orchestrator_losses = Counter(
            "ryzanstein_worker_orchestrator_losses_total",
            "Losses of the orchestrator, by cause.",
            ["cause"],
            registry=registry,
        )
        self.late_instructions = Counter(
            "ryzanstein_worker_late_instructions_total",
            "Answers of the orchestrator that were dropped because they answered an old beat.",
            registry=registry,
        )
        # So that `increase()` sees the first time.
        for cause in ("ended", "silent", "stale_leader", "unavailable", "deadline_exceeded"):
            self.orchestrator_losses.labels(cause)
        for limit in RenderLimit:
            self.template_limits.labels(limit.value)

    def on_template_limit(self, limit: RenderLimit) -> None:
        self.template_limits.labels(limit.value).inc()
