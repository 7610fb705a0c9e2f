"""The node's metrics. Generation and request ids are never labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.cluster import NodeState
from ryzanstein.observe.metrics import FormerName, labelled_registry
from ryzanstein.worker.engine.messages import ClassStats, EngineStats
from ryzanstein.worker.page_metrics import PageMetrics
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.supervision.recovery import Rung
from ryzanstein.worker.telemetry.adapter_metrics import AdapterMetrics
from ryzanstein.worker.telemetry.attempt_metrics import AttemptMetrics
from ryzanstein.worker.telemetry.constraint_metrics import ConstraintMetrics
from ryzanstein.worker.telemetry.kv_metrics import KvMetrics
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics
from ryzanstein.worker.telemetry.rank_metrics import RankMetrics

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
STEP_TOKEN_BUCKETS = tuple(float(2**power) for power in range(14))
STEP_SEQUENCE_BUCKETS = tuple(float(2**power) for power in range(10))


class WorkerTelemetry:
    """The metrics of one model's agent.

    `node` has those that the agents of a node share; an agent alone has both in one registry. `model` is the name of the model
    that it serves or served last.
    """

    def __init__(self, node: NodeMetrics | None = None) -> None:
        self.node = node or NodeMetrics()
        self.registry = registry = self.node.registry if node is None else CollectorRegistry()
        self.background = self.node.background
        self.model = ""
        self.state = self._gauge("state", "1 for the current state of the node, else 0.", "state")
        self.asleep = self._gauge("asleep", "1 if the ranks are unloaded because the model was idle, else 0.")
        self.wakeups = self._renamed("wakeups_total", "wakes", "Requests that found the ranks unloaded and waited for them.")
        self.links = self._gauge("links", "Connected routers.")
        self.link_overflows = self._counter("link_overflows_total", "Links closed because their router did not read.")
        self.beats = self._counter("beats_total", "Status beats sent.")

        self.running = self._gauge("running", "Running sequences.")
        self.waiting = self._gauge("waiting", "Waiting sequences.")
        self.class_waiting = self._gauge("class_waiting", "Waiting sequences, by priority.", "priority")
        self.class_tokens = self._counter("class_tokens_total", "Tokens computed, by priority.", "priority", "kind")
        self.expected_wait = self._gauge("expected_wait_seconds", "Expected wait of a request that joins the queue now.")
        self.tokens = self._counter("tokens_total", "Tokens computed.", "kind")
        self.prefix_tokens = self._counter("prefix_tokens_total", "Prompt tokens looked up in the prefix cache.", "outcome")
        self.preemptions = self._counter("preemptions_total", "Running sequences paused, which frees their KV blocks.")
        self.paused = self._counter("paused_total", "Running sequences paused, by cause.", "cause")
        self.resumed = self._counter("resumed_total", "Paused sequences resumed.")
        self.shed = self._counter("shed_total", "Groups refused for lack of room or time, by cause.", "cause")
        self.step_tokens = self._histogram("step_tokens", "Tokens that a step computed.", STEP_TOKEN_BUCKETS)
        self.step_sequences = self._histogram(
            "step_sequences", "Running sequences after a step that computed tokens.", STEP_SEQUENCE_BUCKETS
        )

        self.tool_fallbacks = self._counter("tool_fallbacks_total", "Requests with tools whose chat template knows none.")
        self.refusals = self._counter("refusals_total", "Submits refused, by reason.", "reason")
        self.recoveries = self._counter("recoveries_total", "Recovery actions, by rung of the recovery ladder.", "rung")
        self.late_tokens = self._counter("late_tokens_total", "Tokens dropped because their choice had ended at a stop string.")
        self.kv, self.pages = KvMetrics(registry), PageMetrics(registry)
        self.attempts, self.ranks = AttemptMetrics(registry), RankMetrics(registry)
        self.constraints, self.adapters = ConstraintMetrics(registry), AdapterMetrics(registry)
        for rung in Rung:  # so that `increase()` sees the first time
            self.recoveries.labels(rung.value)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ryzanstein_worker_{name}", text, labels, registry=self.registry)

    def _renamed(self, name: str, former: str, text: str) -> Counter:
        """Returns a counter that is also served under the name that it had in the release before."""
        counter = self._counter(name, text)
        self.registry.register(FormerName(counter, f"ryzanstein_worker_{former}"))
        return counter

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ryzanstein_worker_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"ryzanstein_worker_{name}", text, buckets=buckets, registry=self.registry)

    def set_state(self, state: NodeState) -> None:
        for other in NodeState:
            if other is not NodeState.UNSPECIFIED:
                self.state.labels(other.name.lower()).set(other is state)

    def ranks_ready(self, ranks: Sequence[RankReady]) -> None:
        self.kv.ready(ranks)
        self.ranks.ready(ranks)

    def engine(self, stats: EngineStats) -> None:
        """Shows what an engine reports of this moment."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.expected_wait.set(stats.expected_wait_s)
        self.kv.show(stats)
        for priority, now in stats.classes.items():
            self.class_waiting.labels(str(priority)).set(now.waiting)

    def step(self, stats: EngineStats, before: EngineStats) -> None:
        """Observes a step, from the engine's statistics after it and after the step before."""
        computed = stats.prefill_tokens + stats.decode_tokens - before.prefill_tokens - before.decode_tokens
        if computed > 0:
            self.step_tokens.observe(computed)
            self.step_sequences.observe(stats.running)

    def count(self, stats: EngineStats, old: EngineStats) -> None:
        """Adds what an engine counted since its `old` statistics.

        Each engine counts from its own start, these metrics from the agent's.
        """
        self._by_cause(stats, old)
        self._by_priority(stats, old)
        self.constraints.count(stats.constraints, old.constraints)
        self.kv.count(stats, old)
        self.preemptions.inc(stats.preemptions - old.preemptions)
        self.tokens.labels("prefill").inc(stats.prefill_tokens - old.prefill_tokens)
        self.tokens.labels("decode").inc(stats.decode_tokens - old.decode_tokens)
        hits = stats.prefix_hits - old.prefix_hits
        self.prefix_tokens.labels("hit").inc(hits)
        self.prefix_tokens.labels("miss").inc(stats.prefix_queries - old.prefix_queries - hits)

    def _by_cause(self, stats: EngineStats, old: EngineStats) -> None:
        self.resumed.inc(stats.resumed - old.resumed)
        for cause, num in stats.paused.items():
            self.paused.labels(cause).inc(num - old.paused.get(cause, 0))
        for cause, num in stats.shed.items():
            self.shed.labels(cause).inc(num - old.shed.get(cause, 0))

    def _by_priority(self, stats: EngineStats, old: EngineStats) -> None:
        for priority, now in stats.classes.items():
            before = old.classes.get(priority, ClassStats())
            self.class_tokens.labels(str(priority), "prefill").inc(now.prefill_tokens - before.prefill_tokens)
            self.class_tokens.labels(str(priority), "decode").inc(now.decode_tokens - before.decode_tokens)


class NodeTelemetry:
    """The metrics of a node: its own, and those of its models, which have the label `model` in `registry`.

    Those of the first model have it as soon as there is one. The others come and go with their models.
    """

    def __init__(self) -> None:
        self.node = NodeMetrics()
        self.first = WorkerTelemetry(self.node)
        self._others: dict[str, WorkerTelemetry] = {}
        self.registry = labelled_registry(self.node.registry, "model", self._models)

    def add(self, model: str) -> WorkerTelemetry:
        """Returns the metrics of a further model; they count from zero."""
        telemetry = self._others[model] = WorkerTelemetry(self.node)
        return telemetry

    def remove(self, model: str) -> None:
        self._others.pop(model, None)

    def _models(self) -> Iterator[tuple[str, CollectorRegistry]]:
        yield self.first.model, self.first.registry
        for model, telemetry in list(self._others.items()):  # at once: they come and go meanwhile
            yield model, telemetry.registry
