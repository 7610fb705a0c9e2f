"""TLS of the ports of the builtin gRPC server, and the authentication context of its calls."""

from __future__ import annotations

import ssl
from typing import Any

from ryzanstein.auth.certificates.files import as_path
from ryzanstein.auth.certificates.public import CIPHERS
from ryzanstein.rpc.tls.client_context import HTTP_2


def server_context(chain: bytes, key: bytes, roots: bytes = b"") -> ssl.SSLContext:
    """Returns the context of handshakes with this certificate. With `roots` a client must have a certificate of these CAs.

    Each connection checks the client's certificate anew: no session is resumed. Python cannot switch off the sessions of
    TLS 1.2, so such clients need TLS 1.3. Raises ssl.SSLError for a certificate that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if roots else ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols([HTTP_2])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    if roots:
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA of `ca.crt` may have an issuer itself
        context.load_verify_locations(cadata=roots.decode("ascii", "ignore"))
        context.num_tickets = 0
    with as_path(chain) as chain_path, as_path(key) as key_path:
        context.load_cert_chain(chain_path, key_path)
    return context


def speaks_http2(connection: ssl.SSLObject) -> bool:
    """Returns whether client and server have agreed on HTTP/2."""
    return connection.selected_alpn_protocol() == HTTP_2


def auth_context(connection: ssl.SSLObject) -> dict[str, list[bytes]]:
    """Returns what gRPC tells a call of its connection: that it has TLS, and the client's certificate, if it has shown one."""
    context = {"transport_security_type": [b"ssl"], "security_level": [b"TSI_PRIVACY_AND_INTEGRITY"]}
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        return context
    about: dict[str, Any] = connection.getpeercert() or {}
    names = [(kind, name) for kind, name in about.get("subjectAltName", ()) if isinstance(name, str)]
    context["x509_pem_cert"] = [ssl.DER_cert_to_PEM_cert(certificate).encode()]
    context["x509_subject_alternative_name"] = [name.encode() for _, name in names]
    context["peer_uri"] = [name.encode() for kind, name in names if kind == "URI"]
    context["peer_dns"] = [name.encode() for kind, name in names if kind == "DNS"]
    return context
