"""What a service counts of the certificates that it uses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge


class CertificateMetrics:
    """The metrics of one set of certificates. `prefix` is the service, and which of its sets if it has several."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        self._expiry = Gauge(
            f"ryzanstein_{prefix}_tls_expiry_seconds",
            "Time until the certificate in a file expires; of several, the first.",
            ["file"],
            registry=registry,
        )
        self._life = Gauge(
            f"ryzanstein_{prefix}_tls_life_seconds",
            "How long the service's own certificate is valid, from its begin to its end.",
            registry=registry,
        )
        self.reloads = Counter(
            f"ryzanstein_{prefix}_tls_reloads_total",
            "New certificates, by whether they can be used.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("ok", "failed"):  # so that `increase()` sees the first one
            self.reloads.labels(outcome)

    def expire(self, expires: Mapping[str, float], life_s: float) -> None:
        """Takes the Unix times at which the certificates of the files expire, and how long the service's own is valid."""
        self._life.set(life_s)
        for file, at in expires.items():
            self._expiry.labels(file).set_function(partial(_left_s, at))


def _left_s(at: float) -> float:
    return at - time.time()
