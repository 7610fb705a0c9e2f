"""The metrics of a model's adapters. Their names are no labels: there may be thousands."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class AdapterMetrics:
    """What an agent has registered, and what is in the memory of its ranks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"ryzanstein_worker_{name}", text, registry=registry)

        self.registered = gauge("adapters_registered", "Adapters that requests may name.")
        self.refused = gauge("adapters_refused", "Adapters that are wanted and do not fit the model, or cannot be read.")
        self.resident = gauge("adapters_resident", "Adapters in the memory of the ranks.")
        self.bytes = gauge("adapter_bytes", "Memory of the adapters in the ranks, or being loaded.")
        self.evictions = Counter(
            "ryzanstein_worker_adapter_evictions_total", "Adapters that left memory for others.", registry=registry
        )
        self.requests = Counter(
            "ryzanstein_worker_adapter_requests_total",
            "Attempts with an adapter, by whether it was in memory.",
            ["outcome"],
            registry=registry,
        )
        self.load = Histogram(
            "ryzanstein_worker_adapter_load_seconds",
            "Time to read and pack an adapter, without the wait for room.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
            registry=registry,
        )
        for outcome in ("hit", "miss"):
            self.requests.labels(outcome)
