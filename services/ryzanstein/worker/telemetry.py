"""The node's metrics. Generation and request ids are never labels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.cluster import NodeState
from ryzanstein.errors import LOGITS_NOT_FINITE, OUT_OF_MEMORY, RyzansteinError
from ryzanstein.observe.metrics import (
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    TIME_TO_FIRST_TOKEN_BUCKETS,
    FormerName,
    merged_registry,
    new_registry,
)
from ryzanstein.process.background import Background
from ryzanstein.process.loop_lag import LoopLag
from ryzanstein.worker.constraints.refusal import Cause
from ryzanstein.worker.engine.messages import ClassStats, ConstraintStats, EngineStats, HotStats
from ryzanstein.worker.page_metrics import PageMetrics
from ryzanstein.worker.settings.quantization import KV_COMPRESSIONS
from ryzanstein.worker.supervision.group import LossCause, RankProgress
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.supervision.recovery import Rung
from ryzanstein.worker.text.grammars.verdicts import GrammarObserver
from ryzanstein.worker.text.templates.rendering import RenderLimit

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
_COUNTED = ("preemptions", "takebacks", "prefix_queries", "prefix_hits", "prefill_tokens", "decode_tokens")


class KvPageMetrics:
    """The metrics of pages of keys and values: how they are kept, what is sealed and evicted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "ryzanstein_worker_kv_{}".format
        self.evicted = Counter(name("blocks_evicted_total"), "Idle KV blocks given up.", ("kind",), registry=registry)
        self.sealed = Counter(name("pages_sealed_total"), "Pages of keys and values compressed.", registry=registry)
        self.hot_held = Gauge(name("hot_pages_held"), "Pages in full precision that sequences hold.", registry=registry)
        self.hot_cached = Gauge(name("hot_pages_cached"), "Idle pages in full precision, to resume from.", registry=registry)
        self.sparse = Gauge(
            "ryzanstein_worker_sparse_attention", "1 for the rule of sparse attention.", ("rule",), registry=registry
        )
        self.compression = Gauge(name("compression"), "1 for how older keys and values are kept.", ("kind",), registry=registry)

    def set_sparse(self, rule: str) -> None:
        """Shows the rule of sparse attention that is in force; empty: there is none."""
        self.sparse.clear()
        if rule:
            self.sparse.labels(rule).set(1)

    def set_compression(self, kept: str) -> None:
        for kind in KV_COMPRESSIONS:
            self.compression.labels(kind).set(kind == kept)

    def show(self, hot: HotStats) -> None:
        self.hot_held.set(hot.held)
        self.hot_cached.set(hot.cached)

    def count(self, stats: EngineStats, old: EngineStats) -> None:
        """Adds what an engine counted since its `old` statistics."""
        hot, before = stats.hot or HotStats(), old.hot or HotStats()
        self.evicted.labels("block").inc(stats.blocks_evicted - old.blocks_evicted)
        self.evicted.labels("hot").inc(hot.evicted - before.evicted)
        self.sealed.inc(hot.sealed - before.sealed)


class ConstraintMetrics:
    """The metrics of constraints on answers: how they are judged, compiled and turned into masks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        self.compile = Histogram(
            "ryzanstein_worker_grammar_compile_seconds",
            "CPU time to compile a constraint.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
            registry=registry,
        )
        self.refusals = counter("grammar_refusals_total", "Constraints refused, by cause.", "cause")
        self.verdicts = counter("grammar_verdicts_total", "Constraints looked up before a compile.", "outcome")
        self.grammars = counter("grammars_total", "Compiled constraints looked up on rank 0.", "outcome")
        self.evictions = counter("grammar_evictions_total", "Compiled constraints dropped for lack of room.")
        self.mask_time = counter("mask_seconds_total", "Time to compute token masks, beside the steps.")
        self.mask_wait = counter("mask_wait_seconds_total", "Time that steps waited for token masks.")
        for cause in Cause:
            self.refusals.labels(cause.value)

    @property
    def observer(self) -> GrammarObserver:
        """Counts what the grammar process does."""
        return GrammarObserver(
            self.compile.observe,
            lambda cause: self.refusals.labels(cause.value).inc(),
            lambda known: self.verdicts.labels("hit" if known else "miss").inc(),
        )

    def count(self, now: ConstraintStats, old: ConstraintStats) -> None:
        """Adds what rank 0 counted since the `old` statistics."""
        self.grammars.labels("hit").inc(now.grammar_hits - old.grammar_hits)
        self.grammars.labels("miss").inc(now.grammar_misses - old.grammar_misses)
        self.evictions.inc(now.grammar_evictions - old.grammar_evictions)
        self.mask_time.inc(now.mask_s - old.mask_s)
        self.mask_wait.inc(now.wait_s - old.wait_s)


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


class WorkerTelemetry:
    """The metrics of one model's agent, created in `__main__` and passed on.

    Agents of one process share `background`.
    """

    def __init__(self, background: Background | None = None) -> None:
        self.registry: CollectorRegistry = new_registry() if background is None else CollectorRegistry()
        self.background = background or Background("worker", self.registry)
        self.state = self._gauge("state", "1 for the current state of the node, else 0.", "state")
        self.asleep = self._gauge("asleep", "1 if the ranks are unloaded because the model was idle, else 0.")
        self.wakeups = self._renamed("wakeups_total", "wakes", "Requests that found the ranks unloaded and waited for them.")
        self.links = self._gauge("links", "Connected routers.")
        self.running = self._gauge("running", "Running sequences.")
        self.waiting = self._gauge("waiting", "Waiting sequences.")
        self.kv_blocks_held = self._gauge("kv_blocks_held", "KV blocks held by running sequences.")
        self.kv_blocks_cached = self._gauge("kv_blocks_cached", "Idle KV blocks kept in the prefix cache.")
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks of the model's own.")
        self.kv_blocks_limit = self._gauge(
            "kv_blocks_limit", "KV blocks that the engine may use, with what is lent and borrowed."
        )
        self.kv_kept = KvPageMetrics(self.registry)
        self.kv_bytes_borrowed = self._gauge("kv_bytes_borrowed", "KV memory that the model has from others of the node.")
        self.kv_bytes_lent = self._gauge("kv_bytes_lent", "KV memory of the model's own that others of the node have.")
        self.kv_takebacks = self._counter("kv_takebacks_total", "Times that KV blocks in use had to be given back.")
        self.resident = self._gauge("rank_resident_bytes", "Resident memory of a rank.", "rank")
        self.startup_phase = self._gauge("startup_phase_seconds", "Duration of a rank's last start, by phase.", "phase", "rank")

        self.native_kernels = self._gauge("native_kernels", "1 if the rank computes with native kernels, else 0.", "rank")
        self.row_invariant = self._gauge("row_invariant", "1 if logits do not depend on the other rows of a step.", "rank")

        self.tokens = self._counter("tokens_total", "Tokens computed.", "kind")
        self.prefix_tokens = self._counter("prefix_tokens_total", "Prompt tokens looked up in the prefix cache.", "outcome")
        self.preemptions = self._counter("preemptions_total", "Running sequences paused, which frees their KV blocks.")
        self.paused = self._counter("paused_total", "Running sequences paused, by cause.", "cause")
        self.resumed = self._counter("resumed_total", "Paused sequences resumed.")
        self.shed = self._counter("shed_total", "Groups refused for lack of room or time, by cause.", "cause")
        self.expected_wait = self._gauge("expected_wait_seconds", "Expected wait of a request that joins the queue now.")
        self.class_waiting = self._gauge("class_waiting", "Waiting sequences, by priority.", "priority")
        self.class_tokens = self._counter("class_tokens_total", "Tokens computed, by priority.", "priority", "kind")
        self.generations = self._counter("generations_total", "Attempts ended, by outcome.", "outcome")
        self.choices = self._counter("choices_total", "Choices ended, by finish reason.", "reason")
        self.tool_fallbacks = self._counter("tool_fallbacks_total", "Requests with tools whose chat template knows none.")
        self.refusals = self._counter("refusals_total", "Submits refused, by reason.", "reason")
        self.rank_losses = self._counter("rank_losses_total", "Times the ranks were lost and restarted.", "cause", "rank")
        self.recoveries = self._counter("recoveries_total", "Recovery actions, by rung of the recovery ladder.", "rung")
        self.link_overflows = self._counter("link_overflows_total", "Links closed because their router did not read.")
        self.late_tokens = self._counter("late_tokens_total", "Tokens dropped because their choice had ended at a stop string.")
        self.template_limits = self._counter("template_limits_total", "Chats whose template exceeded a limit.", "limit")
        self.constraints = ConstraintMetrics(self.registry)
        self.embeddings = NodeEmbeddingMetrics(self.registry)
        self.beats = self._counter("beats_total", "Status beats sent.")
        self.orchestrator_losses = self._counter("orchestrator_losses_total", "Losses of the orchestrator, by cause.", "cause")
        self.pages = PageMetrics(self.registry)
        self.loop_lag = LoopLag("worker", self.registry)
        self.step = self._histogram("step_seconds", "Duration of steps, sampled.", TIME_PER_OUTPUT_TOKEN_BUCKETS, "rank")
        self.slowness = self._gauge("rank_slowness", "Computing time of a rank relative to the median of the others.", "rank")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from submit to the first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time per token of a choice, after the first.", TIME_PER_OUTPUT_TOKEN_BUCKETS
        )
        self._steps: dict[int, int] = {}
        self._show_zeros()

    def _show_zeros(self) -> None:
        """Shows what has not happened yet, so that `increase()` sees the first time."""
        for outcome in (LOGITS_NOT_FINITE, OUT_OF_MEMORY):
            self.generations.labels(outcome.lower())
        for cause in ("ended", "silent", "unavailable", "deadline_exceeded"):
            self.orchestrator_losses.labels(cause)
        for limit in RenderLimit:
            self.template_limits.labels(limit.value)
        for rung in Rung:
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

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"ryzanstein_worker_{name}", text, labels, buckets=buckets, registry=self.registry)

    def on_template_limit(self, limit: RenderLimit) -> None:
        self.template_limits.labels(limit.value).inc()

    def set_state(self, state: NodeState) -> None:
        for other in NodeState:
            if other is not NodeState.UNSPECIFIED:
                self.state.labels(other.name.lower()).set(other is state)

    def ranks_ready(self, ranks: Sequence[RankReady]) -> None:
        self.kv_blocks.set(ranks[0].num_blocks)
        self.kv_kept.set_compression(ranks[0].kv_compression)
        self.kv_kept.set_sparse(ranks[0].sparse_attention)
        for answer in ranks:
            self._set_phases(str(answer.rank), answer.startup_phases)
            self.native_kernels.labels(str(answer.rank)).set(not answer.without_kernels)
            self.row_invariant.labels(str(answer.rank)).set(not answer.company_matters)
            for cause in LossCause:  # so that `increase()` sees the first loss
                self.rank_losses.labels(cause.value.lower(), str(answer.rank))

    def ranks_gone(self) -> None:
        """Forgets the last steps: new ranks count from zero."""
        self._steps = {}

    def _set_phases(self, rank: str, phases: Mapping[str, float]) -> None:
        for phase, duration_s in phases.items():
            self.startup_phase.labels(phase, rank).set(duration_s)

    def engine(self, stats: EngineStats) -> None:
        """Shows what an engine reports of this moment."""
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.expected_wait.set(stats.expected_wait_s)
        self.kv_blocks_held.set(stats.blocks_held)
        self.kv_blocks_cached.set(stats.blocks_cached)
        self.kv_blocks_limit.set(stats.block_limit)
        self.kv_kept.show(stats.hot or HotStats())
        for priority, now in stats.classes.items():
            self.class_waiting.labels(str(priority)).set(now.waiting)

    def lending(self, borrowed_bytes: int, lent_bytes: int) -> None:
        self.kv_bytes_borrowed.set(borrowed_bytes)
        self.kv_bytes_lent.set(lent_bytes)

    def count(self, stats: EngineStats, old: EngineStats) -> None:
        """Adds what an engine counted since its `old` statistics.

        Each engine counts from its own start, these metrics from the agent's.
        """
        new = {name: getattr(stats, name) - getattr(old, name) for name in _COUNTED}
        self._by_cause(stats, old)
        self._by_priority(stats, old)
        self.constraints.count(stats.constraints, old.constraints)
        self.preemptions.inc(new["preemptions"])
        self.kv_takebacks.inc(new["takebacks"])
        self.kv_kept.count(stats, old)
        self.tokens.labels("prefill").inc(new["prefill_tokens"])
        self.tokens.labels("decode").inc(new["decode_tokens"])
        self.prefix_tokens.labels("hit").inc(new["prefix_hits"])
        self.prefix_tokens.labels("miss").inc(new["prefix_queries"] - new["prefix_hits"])

    def memory(self, resident_bytes: Sequence[int]) -> None:
        """Sets the resident memory of each rank, in rank order."""
        for rank, size in enumerate(resident_bytes):
            self.resident.labels(str(rank)).set(size)

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

    def progress(self, ranks: Sequence[RankProgress], slowness: Mapping[int, float]) -> None:
        """Samples each rank's last step, at most once per step."""
        for number, ratio in slowness.items():
            self.slowness.labels(str(number)).set(ratio)
        for rank in ranks:
            if rank.last_step_s > 0 and self._steps.get(rank.rank) != rank.step:
                self._steps[rank.rank] = rank.step
                self.step.labels(str(rank.rank)).observe(rank.last_step_s)


class NodeTelemetry:
    """The metrics of a node: those of its first model, and those of the others by their names.

    In `registry` the others' have the label `model`. They come and go with their models.
    """

    def __init__(self) -> None:
        self.first = WorkerTelemetry()
        self._others: dict[str, CollectorRegistry] = {}
        self.registry = merged_registry(self.first.registry, self._others, "model")

    def add(self, model: str) -> WorkerTelemetry:
        """Returns the metrics of a further model; they count from zero."""
        telemetry = WorkerTelemetry(self.first.background)
        self._others[model] = telemetry.registry
        return telemetry

    def remove(self, model: str) -> None:
        self._others.pop(model, None)
