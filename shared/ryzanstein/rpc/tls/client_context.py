"""TLS of a connection that this process opens itself, with the rules of gRPC's own: HTTP/2, and a server of one name."""

from __future__ import annotations

import ssl
from typing import Protocol

from ryzanstein.auth.certificates.files import as_path

HTTP_2 = "h2"


class ClientCertificate(Protocol):
    """A key, its certificate and the CAs that are trusted, in PEM form."""

    @property
    def chain(self) -> bytes: ...

    @property
    def key(self) -> bytes: ...

    @property
    def roots(self) -> bytes: ...


def client_context(certificate: ClientCertificate) -> ssl.SSLContext:
    """Returns the context of handshakes with this certificate. Raises ssl.SSLError for one that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA of `ca.crt` may have an issuer itself
    context.hostname_checks_common_name = False
    context.set_alpn_protocols([HTTP_2])
    context.load_verify_locations(cadata=certificate.roots.decode("ascii", "ignore"))
    with as_path(certificate.chain) as chain, as_path(certificate.key) as key:
        context.load_cert_chain(chain, key)
    return context
