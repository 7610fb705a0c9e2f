"""The metrics of the services, from collectors that are built as the services build them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from ryzanstein.auth.audit.auditor import audit_failures
from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.lab.reference.markdown import GENERATED, table
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.router.access.authenticator import Anonymous
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.telemetry import KeyMetrics
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.faces.websocket.telemetry import SocketTelemetry
from ryzanstein.router.journal.metrics import JournalMetrics
from ryzanstein.router.sessions.store import SessionBounds
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.telemetry import HandshakeMetrics, RouterTelemetry
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.worker.telemetry import WorkerTelemetry

_INTRODUCTION = f"""# Metrics

{GENERATED}

Every service answers `GET /metrics` on `metrics_port`, in Prometheus' text format. Besides these it has the metrics of its
process that prometheus_client provides (`process_*`, `python_*`). Histograms have `_bucket`, `_sum` and `_count`. The id of a
request, session or generation is never a label. A node's metrics also have the label `model`, except those that its models
share. [Observe](../operate/observe.md) says which metric answers which question.
"""


def metrics_page() -> str:
    """Returns the page with a table for each service."""
    lines = [_INTRODUCTION]
    for service, registry in registries().items():
        rows = sorted(_rows(registry))
        lines += [f"## {service.capitalize()}", "", *table(("metric", "type", "labels", "meaning"), rows)]
    return "\n".join(lines)


def registries() -> dict[str, CollectorRegistry]:
    """Returns the registry of each service, with everything that it may have."""
    made = {"router": _router(), "worker": _worker(), "orchestrator": OrchestratorTelemetry().registry}
    for service, registry in made.items():
        RpcMetrics(service, registry).handshakes("services")
        TlsMetrics(service, registry)
    return {**made, "console": ConsoleTelemetry().registry}


def _router() -> CollectorRegistry:
    telemetry = RouterTelemetry()
    JournalMetrics(telemetry.registry)
    Entrance(Anonymous(), telemetry.registry)
    KeyMetrics(telemetry.registry)
    LimitMetrics(telemetry.registry)
    SocketTelemetry(telemetry)
    HandshakeMetrics(telemetry.registry)
    CertificateMetrics("router_public", telemetry.registry)
    KeptResponses(MemorySessions(SessionBounds(), lambda _: None), telemetry)
    return telemetry.registry


def _worker() -> CollectorRegistry:
    registry = WorkerTelemetry().registry
    audit_failures("worker", registry)
    return registry


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, ...]]:
    """Yields a row for each metric of ours. prometheus_client tells labels only of its own collectors."""
    for collector in set(registry._names_to_collectors.values()):
        labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
        for metric in collector.collect():
            if metric.name.startswith("ryzanstein_"):
                name = f"{metric.name}_total" if metric.type == "counter" else metric.name
                yield f"`{name}`", metric.type, labels, metric.documentation.rstrip(".")
