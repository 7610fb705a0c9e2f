"""TLS of one service: its certificates, the certificates of its port, whom it admits, and how it dials others.

Needs the package `cryptography`, so a service imports this only where TLS is on.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.peers.material import CERTIFICATE, LiveMaterial, Material, trust_of
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import Peer
from ryzanstein.rpc.client import Dialer
from ryzanstein.rpc.tls.peer_guard import PeerGuard
from ryzanstein.rpc.tls.port_certificates import PortCertificates, ShownCertificate


class ServiceTls:
    """What a service needs of TLS. `required`: it listens only with TLS, at `port`."""

    port = 0
    required = True

    def __init__(self, material: LiveMaterial, metrics: TlsMetrics) -> None:
        self.material = material
        self.dialer = Dialer(material)
        self.guard = PeerGuard(material, metrics)

    @classmethod
    def open(cls, directory: Path, trust: str, expected: Peer, metrics: TlsMetrics) -> ServiceTls:
        """Returns the TLS of a service. A peer without a name may have any.

        Raises OSError if the certificates cannot be used, or are another service's.
        """
        try:
            material = LiveMaterial(directory, trust, metrics)
        except MaterialError as error:
            raise OSError(f"the certificates in {directory} cannot be used: {error}") from None
        peer = material.current.peer
        if peer.role is not expected.role or expected.name not in ("", peer.name):
            raise OSError(f"the certificate in {directory} is of {peer}, not of {expected}")
        return cls(material, metrics)

    @property
    def peer(self) -> Peer:
        """Who the service is."""
        return self.material.current.peer

    @property
    def expires(self) -> float:
        """When the certificate expires that the service uses now, in Unix seconds."""
        return self.material.current.expires[CERTIFICATE]

    @property
    def life_s(self) -> float:
        """How long that certificate is valid in all."""
        return self.material.current.life_s

    def certificates(self) -> PortCertificates[Material]:
        """Returns the certificates of one more port, which takes only clients with a certificate of the same CAs."""
        return PortCertificates(self.material, _mutual)


def _mutual(material: Material) -> ShownCertificate:
    return ShownCertificate(material.chain, material.key, material.roots)


def operator_dialer(directory: Path) -> Dialer:
    """Returns how a command dials services. Raises MaterialError."""
    return Dialer(LiveMaterial(directory, trust_of(directory), TlsMetrics("cli", CollectorRegistry())))
