"""The metrics of a service's gRPC calls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

from ryzanstein.observe.metrics import DURATION_BUCKETS
from ryzanstein.rpc.reading import malformed_requests


class RpcMetrics:
    """Built once with a service's registry, for all its servers.

    The label `method` is the service's name and the method's, as in `WorkerService/GetStatus`. Only methods that exist are
    counted, so there are few.
    """

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self.malformed = malformed_requests(service, registry)
        self._seconds = Histogram(
            f"ryzanstein_{service}_rpc_seconds",
            "Duration of gRPC calls; a stream's until it ends.",
            ["method", "code"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._running = Gauge(f"ryzanstein_{service}_rpcs_running", "Running gRPC calls.", ["method"], registry=registry)

    def begun(self, path: str) -> None:
        """Counts a call of a method, as `/package.Service/Method`."""
        self._running.labels(_short(path)).inc()

    def ended(self, path: str, code: str, duration_s: float) -> None:
        """Counts the end of a call that has begun."""
        self._running.labels(_short(path)).dec()
        self._seconds.labels(_short(path), code).observe(duration_s)


def _short(path: str) -> str:
    service, _, method = path.rpartition("/")
    return f"{service.rpartition('.')[2]}/{method}"
