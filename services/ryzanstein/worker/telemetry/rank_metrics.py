"""The metrics of each rank of a model, from what the ranks write on their board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.observe.metrics import TIME_PER_OUTPUT_TOKEN_BUCKETS
from ryzanstein.worker.supervision.group import IDLE, LossCause, RankLoss, RankProgress
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.telemetry.collective_metrics import CollectiveMetrics

_SECONDS = "What the time of a rank was spent on, by phase; on rank 0 idle is without work, on the others between steps."


class RankMetrics:
    """The metrics of the ranks of one model. New ranks count from zero, see `gone`; these metrics from the agent's start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        self._resident = gauge("rank_resident_bytes", "Resident memory of a rank.", "rank")
        self._slowness = gauge("rank_slowness", "Computing time of a rank relative to the median of the others.", "rank")
        self._startup = gauge("startup_phase_seconds", "Duration of a rank's last start, by phase.", "phase", "rank")
        self._kernels = gauge("native_kernels", "1 if the rank computes with native kernels, else 0.", "rank")
        self._native_layers = gauge("native_layers", "Share of layers that small steps run in one native call.", "rank")
        self._invariant = gauge("row_invariant", "1 if logits do not depend on the other rows of a step.", "rank")
        self._losses = counter("rank_losses_total", "Times the ranks were lost and restarted.", "cause", "rank")
        self._seconds = counter("rank_seconds_total", _SECONDS, "rank", "phase")
        self._steps = counter("rank_steps_total", "Steps that a rank has begun.", "rank")
        self._collectives = counter("rank_collectives_total", "Collectives that a rank has entered.", "rank")
        self._step = Histogram(
            "ryzanstein_worker_step_seconds",
            "Duration of steps, sampled.",
            ["rank"],
            buckets=TIME_PER_OUTPUT_TOKEN_BUCKETS,
            registry=registry,
        )
        self.collectives = CollectiveMetrics(registry)
        self._seen: dict[int, RankProgress] = {}

    def ready(self, ranks: Sequence[RankReady]) -> None:
        """Shows what ranks that are ready said of themselves."""
        self.collectives.ready(len(ranks))
        for answer in ranks:
            rank = str(answer.rank)
            for phase, duration_s in answer.startup_phases.items():
                self._startup.labels(phase, rank).set(duration_s)
            self._kernels.labels(rank).set(not answer.without_kernels)
            self._native_layers.labels(rank).set(answer.native_layers)
            self._invariant.labels(rank).set(not answer.company_matters)
            for cause in LossCause:  # so that `increase()` sees the first loss
                self._losses.labels(cause.value.lower(), rank)

    def lost(self, loss: RankLoss) -> None:
        self._losses.labels(loss.cause.value.lower(), str(loss.rank)).inc()

    def gone(self) -> None:
        """Forgets the last steps: new ranks count from zero."""
        self._seen = {}

    def memory(self, resident_bytes: Sequence[int]) -> None:
        """Sets the resident memory of each rank, in rank order."""
        for rank, size in enumerate(resident_bytes):
            self._resident.labels(str(rank)).set(size)

    def progress(self, ranks: Sequence[RankProgress], slowness: Mapping[int, float]) -> None:
        """Adds what the ranks did since the last call, and samples the last step of each."""
        for number, ratio in slowness.items():
            self._slowness.labels(str(number)).set(ratio)
        for now in ranks:
            before = self._seen.get(now.rank)
            self._seen[now.rank] = now
            if now.last_step_s > 0 and (before is None or now.step != before.step):
                self._step.labels(str(now.rank)).observe(now.last_step_s)
            self._count(str(now.rank), now, before if before is not None and before.pid == now.pid else _begun(now))

    def _count(self, rank: str, now: RankProgress, before: RankProgress) -> None:
        spent_before = before.phases_s
        for phase, spent_s in now.phases_s.items():
            if (more_s := spent_s - spent_before[phase]) > 0:
                self._seconds.labels(rank, phase).inc(more_s)
        # All ranks count their collectives anew after a step that was given up.
        more = now.collective - (before.collective if now.collective >= before.collective else 0)
        if more:
            self._collectives.labels(rank).inc(more)
        if now.step > before.step:
            self._steps.labels(rank).inc(now.step - before.step)


def _begun(rank: RankProgress) -> RankProgress:
    """Returns the slot of a rank as it was when the rank began."""
    return RankProgress(rank.rank, rank.pid, 0, 0, IDLE, 0.0, 0.0, 0, 0.0)
