"""The orchestrator's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.auth.audit.auditor import audit_failures
from ryzanstein.observe.metrics import new_registry, show_service
from ryzanstein.orchestrator.model_loads import ModelLoads
from ryzanstein.process.background import Background
from ryzanstein.process.loop_lag import LoopLag

_WRITE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class OrchestratorTelemetry:
    """One instance for the process, built in `__main__` and passed on."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = new_registry()
        self.background = Background("orchestrator", self.registry)
        show_service("orchestrator", self.registry)
        self.nodes = self._gauge("nodes", "Current members.")
        self.watchers = self._gauge("watchers", "Open watches.")
        self.deployments = self._gauge("deployments", "Desired deployments.")
        self.leader = self._gauge("leader", "1: this orchestrator leads, 0: it stands by.")
        self.epoch = self._gauge("epoch", "Epoch of the leader, as far as this orchestrator knows.")
        self.terms = self._counter("terms_total", "Times that this orchestrator began to lead.")
        self.renewals_failed = self._counter("lease_renewals_failed_total", "Renewals of the lease that failed.")
        self.outdated = Gauge(
            "ryzanstein_orchestrator_outdated",
            "Nodes that serve an earlier revision of a deployment.",
            ["model"],
            registry=self.registry,
        )
        self.halted = Gauge(
            "ryzanstein_orchestrator_halted", "1: a revision goes no further.", ["model"], registry=self.registry
        )
        self.short = Gauge(
            "ryzanstein_orchestrator_short",
            "Nodes that a deployment lacks, with those that failed and do not serve it.",
            ["model"],
            registry=self.registry,
        )
        self.models = ModelLoads()
        self.registry.register(self.models)
        self.joins = self._counter("joins_total", "Registrations granted.", "kind")
        self.departures = self._counter("departures_total", "Members that left or whose lease expired.", "cause")
        for cause in ("expired", "left"):  # so that `increase()` sees the first one
            self.departures.labels(cause)
        self.replicas_expired = self._counter(
            "replicas_expired_total", "Models whose start on a node showed no progress for the length of a replica's lease."
        )
        self.beats = self._counter("beats_total", "Heartbeats received.")
        self.changes = self._counter("changes_total", "Changes published to watchers.", "kind")
        self.snapshots = self._counter("snapshots_total", "Snapshots sent; cause overflow: the watcher fell behind.", "cause")
        self.stalls = self._counter("stalls_total", "Pauses of this process after which all leases were restarted.")
        self.placements = self._counter("placements_total", "Placement computations.")
        self.store_errors = self._counter("store_errors_total", "Failed store accesses.", "operation")
        self.audit_failures = audit_failures("orchestrator", self.registry)
        self.settle = Gauge(
            "ryzanstein_orchestrator_settle_seconds",
            "Delay of the first snapshot after the last start.",
            registry=self.registry,
        )
        self.loop_lag = LoopLag("orchestrator", self.registry)
        self.store_access = Histogram(
            "ryzanstein_orchestrator_store_access_seconds",
            "Duration of store accesses, including the wait for the store's thread.",
            ["operation"],
            buckets=_WRITE_BUCKETS,
            registry=self.registry,
        )

    def forget_cluster(self) -> None:
        """Shows no nodes and deployments: another orchestrator does."""
        for gauge in (self.nodes, self.deployments):
            gauge.set(0)
        for labelled in (self.outdated, self.halted, self.short):
            labelled.clear()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"ryzanstein_orchestrator_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ryzanstein_orchestrator_{name}", text, labels, registry=self.registry)
