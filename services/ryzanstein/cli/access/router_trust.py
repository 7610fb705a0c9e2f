"""Whom commands take for a router with TLS: who has a certificate of the CA that the user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
import typer
from prometheus_client import CollectorRegistry

from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.certificates.public import PublicCertificates, why_not_trusted
from ryzanstein.auth.peers.peer import Expect
from ryzanstein.rpc.client import CLIENT_OPTIONS, Dialer
from ryzanstein.survey.reach import RouterTrust, read_roots

CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="RYZANSTEIN_CA",
        dir_okay=False,
        help="CA (PEM file) of a router with TLS.",
    ),
]


class RouterDialer(Dialer):
    """Dials routers as their clients do, where a service is dialled otherwise."""

    def __init__(self, trust: RouterTrust) -> None:
        super().__init__()
        self._trust = trust

    def open_blocking(self, address: str, expect: Expect) -> grpc.Channel:
        """Returns a channel to a router, which the caller closes."""
        options = (*CLIENT_OPTIONS, *self._trust.options)
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(self._trust.roots), options)


@dataclass(frozen=True, slots=True)
class RouterTls:
    """The certificate of the routers of a local cluster, and the CA with which they are reached."""

    certificate: Path
    key: Path
    ca: Path
    trust: RouterTrust

    @classmethod
    def given(cls, certificate: Path | None, key: Path | None, ca: Path | None) -> RouterTls | None:
        """Returns what options name; None if they name none. Raises BadParameter for what cannot be used."""
        if certificate is None or key is None:
            if certificate is not None or key is not None:
                raise typer.BadParameter("give both, or none", param_hint="--tls-cert, --tls-key")
            return None
        certificate, key, ca = (path.resolve() for path in (certificate, key, ca or certificate))
        try:
            pair = PublicCertificates(certificate, key, CertificateMetrics("cli", CollectorRegistry())).current
        except MaterialError as error:
            raise typer.BadParameter(str(error), param_hint="--tls-cert, --tls-key") from None
        roots = roots_of(ca)
        if why := why_not_trusted(pair, roots):
            raise typer.BadParameter(f"{ca} does not vouch for {certificate}: {why}", param_hint="--ca")
        return cls(certificate, key, ca, RouterTrust(roots, pair.names[0]))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the routers."""
        return "--tls-cert", str(self.certificate), "--tls-key", str(self.key)


def roots_of(path: Path) -> bytes:
    """Returns the certificates in a file. Raises BadParameter if it has none."""
    try:
        return read_roots(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--ca") from None
