"""Prometheus metrics: one registry per service, served on its own port.

Names are `ryzanstein_<service>_..._seconds|_bytes|_total`; request, session and generation ids are
never labels. Each service declares its metrics in its own `telemetry` module as one class, which is
created once in `__main__` and passed on.
"""

from __future__ import annotations

import platform
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import ThreadingHTTPServer
from importlib import metadata
from socketserver import TCPServer
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, Gauge, Metric, MetricsHandler, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ryzanstein.observe.lost_lines import LOST_LINES
from ryzanstein.observe.spans.count import SPANS

log = structlog.get_logger(__name__)

# OpenTelemetry's gen_ai bucket lists (status Development, so kept as our own constants), longer: CPUs read a long prompt
# for minutes, and a quantile beyond the last bound is not known.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36,
)  # fmt: skip


def new_registry() -> CollectorRegistry:
    """Returns a registry with the process's own metrics (memory, CPU, descriptors, GC).

    No counter of the process has a `_created` series from then on: they double the series, and nothing reads them.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def show_service(service: str, registry: CollectorRegistry) -> None:
    """Shows which release runs, on which Python, and how many lines its log lost."""
    build = Gauge(
        f"ryzanstein_{service}_build_info", "1: this release runs, on this Python", ["version", "python"], registry=registry
    )
    build.labels(metadata.version("ryzanstein"), platform.python_version()).set(1)
    registry.register(_LostLinesMetric(f"ryzanstein_{service}_log_lines_dropped"))
    registry.register(_SpansMetric(f"ryzanstein_{service}_spans"))


class _LostLinesMetric(Collector):
    """The lines that the log of this service lost, by cause. A process without such a log lost none."""

    _labelnames = ("cause",)

    def __init__(self, name: str) -> None:
        self._name, self._lost = name, LOST_LINES.get(None)

    def describe(self) -> Iterator[Metric]:
        text = "Log lines lost, by cause: unwritten, or limited: libraries wrote more a second than are kept."
        yield CounterMetricFamily(self._name, text, labels=self._labelnames)

    def collect(self) -> Iterator[Metric]:
        (family,) = self.describe()
        for cause, num in ({} if self._lost is None else self._lost.by_cause()).items():
            family.add_sample(f"{self._name}_total", {"cause": cause}, num)
        yield family


class _SpansMetric(Collector):
    """The recorded spans of this service. Absent until the first one ends."""

    _labelnames = ("event",)

    def __init__(self, name: str) -> None:
        self._name = name

    def describe(self) -> Iterator[Metric]:
        text = "Recorded spans, by event: ended, exported, or refused by the collector or disk. The rest is queued or dropped."
        yield CounterMetricFamily(self._name, text, labels=self._labelnames)

    def collect(self) -> Iterator[Metric]:
        (family,) = self.describe()
        counts = {"ended": SPANS.ended, "exported": SPANS.exported, "refused": SPANS.refused}
        for event, num in counts.items() if SPANS.ended else ():
            family.add_sample(f"{self._name}_total", {"event": event}, num)
        yield family


Labelled = Callable[[], Iterable[tuple[str, CollectorRegistry]]]
"""Returns registries, each with a label's value. A value may be empty: then its samples lack the label."""


def labelled_registry(plain: CollectorRegistry, label: str, labelled: Labelled) -> CollectorRegistry:
    """Returns a registry of all metrics: those of `plain` as they are, those of the others with a label.

    No metric is both in `plain` and in another. What `labelled` returns may change, and is asked for at each scrape.
    """
    registry = CollectorRegistry(auto_describe=True)
    registry.register(_Merged(plain, label, labelled))
    return registry


class _Merged(Collector):
    def __init__(self, plain: CollectorRegistry, label: str, labelled: Labelled) -> None:
        self._plain, self._label, self._labelled = plain, label, labelled

    def collect(self) -> Iterator[Metric]:
        yield from self._plain.collect()
        merged: dict[str, Metric] = {}
        for value, registry in self._labelled():
            for metric in registry.collect():
                metric.samples = [self._with(value, sample) for sample in metric.samples]
                if (of_all := merged.setdefault(metric.name, metric)) is not metric:
                    of_all.samples += metric.samples
        yield from merged.values()

    def _with(self, value: str, sample: Sample) -> Sample:
        return sample._replace(labels={**sample.labels, self._label: value}) if value else sample


class FormerName(Collector):
    """A metric under the name that it had in the release before, for dashboards that still read that.

    `former` is without the suffix `_total`.
    """

    def __init__(self, metric: Collector, former: str) -> None:
        self._metric, self._former = metric, former

    def collect(self) -> Iterator[Metric]:
        for family in self._metric.collect():
            alias = Metric(self._former, f"Deprecated, removed in the next release: now {family.name}.", family.type)
            for sample in family.samples:
                alias.samples.append(sample._replace(name=sample.name.replace(family.name, self._former, 1)))
            yield alias


class MetricsPort(Protocol):
    """Where a service's metrics are read; see `MetricsServer`."""

    port: int

    def close(self) -> None: ...


NewMetricsPort = Callable[[CollectorRegistry, str, int], MetricsPort]
"""Takes what `MetricsServer` takes. A service is passed one where it is started."""


class MetricsServer:
    """A server of `/metrics` over HTTP, in its own threads: no scrape waits for the event loop."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server = _server_of(host)((host, port), _MetricsHandler.factory(registry))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsHandler(MetricsHandler):
    """The library's handler, which gives a silent client up."""

    timeout = 5.0


class _HttpServer(ThreadingHTTPServer):
    """A server with a thread for each request."""

    request_queue_size = 128

    def server_bind(self) -> None:
        """Binds. The library would also look up the host's full name, which waits for a name server that is away."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs what a request failed with, except that its client went away. The library would print a traceback."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.warning("metrics request failed", error=repr(error)[:512])


def _server_of(host: str) -> type[_HttpServer]:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return type("MetricsServer", (_HttpServer,), {"address_family": family})
