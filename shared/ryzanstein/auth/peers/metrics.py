"""What every service counts of TLS and of the peers that it refuses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class TlsMetrics:
    """The metrics of one service."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._expiry = Gauge(
            f"ryzanstein_{service}_tls_expiry_seconds",
            "Time until the certificate in a file expires; ca.crt: the first of several.",
            ["file"],
            registry=registry,
        )
        self._life = Gauge(
            f"ryzanstein_{service}_tls_life_seconds",
            "How long the certificate in tls.crt is valid, from its begin to its end.",
            registry=registry,
        )
        self.reloads = Counter(
            f"ryzanstein_{service}_tls_reloads_total",
            "New certificates, by whether they can be used.",
            ["outcome"],
            registry=registry,
        )
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
        for outcome in ("ok", "failed"):  # so that `increase()` sees the first one
            self.reloads.labels(outcome)

    def expire(self, expires: Mapping[str, float], life_s: float) -> None:
        """Takes the Unix times at which the certificates of the files expire, and how long that of tls.crt is valid."""
        self._life.set(life_s)
        for file, at in expires.items():
            self._expiry.labels(file).set_function(partial(_left_s, at))


def _left_s(at: float) -> float:
    return at - time.time()
