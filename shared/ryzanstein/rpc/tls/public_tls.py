"""TLS at the ports for clients: the server shows its certificate, and asks clients for none.

Knows nothing of the CA of the services, whose certificates are worth nothing here.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.certificates.public import PublicCertificates, PublicPair
from ryzanstein.process.background import Background
from ryzanstein.rpc.tls.port_certificates import PortCertificates, ShownCertificate


def public_certificates(
    certificate: Path | None, key: Path | None, service: str, registry: CollectorRegistry, background: Background
) -> PublicCertificates | None:
    """Returns the certificates of a service's ports for clients, looked at from now on; None if it is given none.

    `service` is in the names of the metrics. Raises MaterialError if they cannot be used.
    """
    if certificate is None or key is None:
        return None
    found = PublicCertificates(certificate, key, CertificateMetrics(f"{service}_public", registry))
    background.supervise("public_certificates", found.run)
    return found


def public_port(certificates: PublicCertificates) -> PortCertificates[PublicPair]:
    """Returns the certificates of one more gRPC port."""
    return PortCertificates(certificates, _shown)


def _shown(pair: PublicPair) -> ShownCertificate:
    return ShownCertificate(pair.chain, pair.key)
