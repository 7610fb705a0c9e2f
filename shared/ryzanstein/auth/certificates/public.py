"""The certificate that a service shows its clients: a file with the chain, a file with its key.

It belongs to no role and no trust domain, and nothing here asks clients for one. Needs no package
besides Python's `ssl`: a set is checked by a handshake in memory, as a client would make it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ryzanstein.auth.certificates.files import MaterialError, as_path, current_folder, read_pem
from ryzanstein.auth.certificates.live import LiveCertificates, when
from ryzanstein.auth.certificates.metrics import CertificateMetrics

CERTIFICATE_FILE, KEY_FILE = "tls_cert", "tls_key"
"""The names of the files in messages and metrics: those of the settings."""
_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_MAX_CHAIN = 10
# Of TLS 1.2; those of 1.3 are all good. Each has forward secrecy.
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
# How a certificate in DER form names its key: P-256, P-384, RSA. The TLS of gRPC signs with no other.
_KEY_KINDS = tuple(
    map(
        bytes.fromhex,
        ("06072a8648ce3d020106082a8648ce3d030107", "06072a8648ce3d020106052b81040022", "06092a864886f70d0101010500"),
    )
)
_ROUND_TRIPS = 4
_MISMATCHES = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")  # the last of keys of another type


@dataclass(frozen=True, slots=True)
class PublicPair:
    """A certificate with its key, which was checked. `chain` and `key` are PEM. `context` accepts clients with it.

    `life_s` is from the begin to the end of the certificate, `names` are what it is valid for.
    """

    chain: bytes
    key: bytes = field(repr=False)
    context: ssl.SSLContext
    expires: Mapping[str, float]
    life_s: float
    names: tuple[str, ...]

    @property
    def about(self) -> Mapping[str, str]:
        """What the log says of it."""
        return {"names": ", ".join(self.names), "expires": when(self.expires[CERTIFICATE_FILE])}


class PublicCertificates(LiveCertificates[PublicPair]):
    """The pair in two files as it is now. Raises MaterialError at first, if it cannot be used then."""

    def __init__(self, certificate: Path, key: Path, metrics: CertificateMetrics) -> None:
        check = partial(_checked, certificate, key)
        super().__init__(partial(_read, certificate, key), check, metrics=metrics)


def why_not_trusted(pair: PublicPair, roots: bytes) -> str:
    """Returns why a client with these CAs, in PEM form, does not trust a certificate; empty if it does."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    try:
        client.load_verify_locations(cadata=_blocks(roots))
        _shaken(client, pair.context)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (ssl.SSLError, ValueError) as error:
        return str(error)
    return ""


def _read(certificate: Path, key: Path) -> dict[str, bytes]:
    """Returns both files, from one folder where a mounted Secret replaces all its files at once."""
    if certificate.parent == key.parent:
        folder = current_folder(certificate.parent)
        found = folder / certificate.name, folder / key.name
        if all(path.exists() for path in found):
            certificate, key = found
    return {CERTIFICATE_FILE: read_pem(certificate), KEY_FILE: read_pem(key, private=True)}


def _checked(certificate: Path, key: Path, files: Mapping[str, bytes], before: PublicPair | None) -> PublicPair:
    """Returns the pair. Raises MaterialError, which names the file."""
    chain = [block.decode("ascii", "replace") for block in _BLOCK.findall(files[CERTIFICATE_FILE])]
    if not 0 < len(chain) <= _MAX_CHAIN:
        raise MaterialError(f"{certificate}: must have 1 to {_MAX_CHAIN} certificates in PEM form; it has {len(chain)}")
    # Clients get the leaf and what follows it, so that is what must lead from the leaf upwards.
    client = _client(certificate, [each for each in chain[1:] if each != chain[0]] or chain[:1])
    context = _context(certificate, key, files)
    leaf = _tried(certificate, client, context)
    if not any(kind in ssl.PEM_cert_to_DER_cert(chain[0]) for kind in _KEY_KINDS):
        raise MaterialError(f"{certificate}: must have an RSA, P-256 or P-384 key: gRPC has no others")
    issuer = next((each for each in client.get_ca_certs() if each["subject"] == leaf["issuer"]), leaf)
    ends = min(ssl.cert_time_to_seconds(str(each["notAfter"])) for each in (leaf, issuer))
    names = tuple(str(name) for _, name in leaf.get("subjectAltName", ()))
    if not names:
        raise MaterialError(f"{certificate}: has no subject alternative name, without which clients trust no certificate")
    life_s = ssl.cert_time_to_seconds(str(leaf["notAfter"])) - ssl.cert_time_to_seconds(str(leaf["notBefore"]))
    return PublicPair(files[CERTIFICATE_FILE], files[KEY_FILE], context, {CERTIFICATE_FILE: float(ends)}, life_s, names)


def _client(certificate: Path, anchors: Sequence[str]) -> ssl.SSLContext:
    """Returns the context of a client that trusts these certificates, whatever issued them."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # the names are the operator's choice
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cadata="\n".join(anchors))
    except (ssl.SSLError, ValueError):
        raise MaterialError(f"{certificate}: has a certificate that is damaged") from None
    return client


def _context(certificate: Path, key: Path, files: Mapping[str, bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        # Python reads them from paths alone, and the files may have changed since they were read.
        with as_path(files[CERTIFICATE_FILE]) as chain_path, as_path(files[KEY_FILE]) as key_path:
            context.load_cert_chain(chain_path, key_path, _no_password)
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            raise MaterialError(f"{key}: is not the key of the first certificate in {certificate}") from None
        if "TOO_" in (error.reason or ""):  # EE_KEY_TOO_SMALL, CA_MD_TOO_WEAK
            raise MaterialError(f"{certificate}: is too weak ({error.reason})") from None
        raise MaterialError(f"{key}: is no private key in PEM form") from None
    except _HasPasswordError:
        raise MaterialError(f"{key}: has a password; this service has nobody to ask for it") from None
    return context


def _tried(certificate: Path, client: ssl.SSLContext, served: ssl.SSLContext) -> dict[str, Any]:
    """Returns what a client sees of the certificate. Raises MaterialError if it does not trust it, such as for its dates."""
    try:
        return _shaken(client, served)
    except ssl.SSLCertVerificationError as error:
        raise MaterialError(f"{certificate}: clients would refuse it: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise MaterialError(f"{certificate}: clients would refuse it: {error.reason}") from None


def _shaken(client: ssl.SSLContext, served: ssl.SSLContext) -> dict[str, Any]:
    """Makes a handshake in memory, and returns the server's certificate. Raises SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), served.wrap_bio(to_server, to_client, server_side=True)
    for side in sides * _ROUND_TRIPS:
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return sides[0].getpeercert() or {}


def _blocks(content: bytes) -> str:
    """Returns the certificates alone: what else a file says may be in any encoding."""
    return "\n".join(block.decode("ascii", "replace") for block in _BLOCK.findall(content))


class _HasPasswordError(Exception):
    pass


def _no_password() -> str:
    raise _HasPasswordError
