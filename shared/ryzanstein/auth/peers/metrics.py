"""What every service counts of TLS and of the peers that it refuses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from ryzanstein.auth.certificates.metrics import CertificateMetrics


class TlsMetrics(CertificateMetrics):
    """The metrics of one service."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        super().__init__(service, registry)
        self.peer_refused = Counter(
            f"ryzanstein_{service}_peer_refused_total",
            "Calls that were refused for the role or name of the peer's certificate.",
            ["role", "method"],
            registry=registry,
        )
        self.plaintext_calls = Counter(
            f"ryzanstein_{service}_plaintext_calls_total",
            "Calls without TLS at a service that also accepts TLS, without health checks.",
            registry=registry,
        )
