"""The TLS of a service as its settings say; what that needs is loaded only where TLS is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import Peer
from ryzanstein.config import ServiceSettings
from ryzanstein.process.background import Background
from ryzanstein.rpc.client import PLAIN, Dialer

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.service_tls import ServiceTls


def service_tls(
    settings: ServiceSettings, expected: Peer, service: str, registry: CollectorRegistry, background: Background
) -> ServiceTls | None:
    """Returns the TLS of the service, None where it is off. A peer without a name may have any.

    `service` is in the names of its metrics.

    Raises OSError if the certificates cannot be used, or are another service's.
    """
    if settings.tls == "off" or settings.tls_dir is None:
        return None
    try:
        from ryzanstein.rpc.tls.service_tls import ServiceTls
    except ModuleNotFoundError as error:
        if error.name != "cryptography":
            raise
        raise OSError(f"tls {settings.tls} needs the package cryptography: pip install 'ryzanstein[tls]'") from None
    tls = ServiceTls.open(settings.tls_dir, settings.trust_domain, expected, TlsMetrics(service, registry))
    tls.port, tls.required = settings.tls_port, settings.tls == "require"
    background.supervise("certificates", tls.material.run)
    return tls


def dialer_of(tls: ServiceTls | None) -> Dialer:
    """Returns how a service dials others: with TLS where it has certificates."""
    return PLAIN if tls is None else tls.dialer
