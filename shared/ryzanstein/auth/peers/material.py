"""A service's certificate, key and CAs, read from a directory as one set that was checked.

The directory has `tls.crt` (the certificate, perhaps with intermediate ones), `tls.key`, `ca.crt`
(one CA or several, while they are changed), and perhaps `denied`: a line for each SHA-256 fingerprint
or identity, such as `node/n-1`, that is not trusted any more. Needs the package `cryptography`.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ryzanstein.auth.certificates.files import MaterialError, current_folder, read_pem
from ryzanstein.auth.certificates.live import LiveCertificates, when
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole, checked_peer, read_uri

CERTIFICATE, KEY, CAS, DENIED = "tls.crt", "tls.key", "ca.crt", "denied"
_MAX_CHAIN = 5
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Denied:
    """The certificates that are not trusted any more, by fingerprint or by who they are of."""

    fingerprints: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()

    def denies(self, peer: Peer, certificate: bytes = b"") -> bool:
        """Whether this peer, or its certificate in PEM, is not trusted."""
        return str(peer) in self.peers or bool(
            self.fingerprints and certificate and fingerprint_of(certificate) in self.fingerprints
        )


@dataclass(frozen=True, slots=True)
class Material:
    """A set that was checked: `chain`, `key` and `roots` are PEM. `expires`: Unix seconds by file; `life_s`: of tls.crt."""

    chain: bytes
    key: bytes = field(repr=False)
    roots: bytes
    peer: Peer
    serial: int
    expires: dict[str, float]
    life_s: float
    denied: Denied

    def denies(self, peer: Peer) -> bool:
        """Whether this peer is not trusted any more, whatever its certificate."""
        return self.denied.denies(peer)

    @property
    def about(self) -> Mapping[str, str]:
        """What the log says of it."""
        return {"peer": str(self.peer), "serial": f"{self.serial:x}", "expires": when(self.expires[CERTIFICATE])}


def read_material(directory: Path, trust: str, now: float) -> Material:
    """Returns the set in a directory. Raises MaterialError."""
    return checked_material(read_files(directory), trust, now)


def read_files(directory: Path) -> dict[str, bytes]:
    """Returns the content of the files by name, `denied` only if it is there. Raises MaterialError."""
    folder = current_folder(directory)
    files = {name: read_pem(folder / name, private=name == KEY) for name in (CERTIFICATE, KEY, CAS)}
    if (folder / DENIED).exists():
        files[DENIED] = read_pem(folder / DENIED)
    return files


def checked_material(files: dict[str, bytes], trust: str, now: float) -> Material:
    """Returns the set. Raises MaterialError, which names the file."""
    leaf, *intermediates = _certificates(files[CERTIFICATE], CERTIFICATE)
    roots = _certificates(files[CAS], CAS)
    _check_key(files[KEY], leaf)
    peer = _checked_leaf(leaf, trust, now)
    if any(not _is_authority(root) for root in roots):
        raise MaterialError(f"{CAS}: has a certificate that is no CA's")
    _check_chain(leaf, intermediates, roots, now)
    expires = {CERTIFICATE: _end(leaf), CAS: _soonest(roots, now)}
    denied = _denied(files.get(DENIED, b""))
    life_s = _end(leaf) - _begin(leaf)
    return Material(files[CERTIFICATE], files[KEY], files[CAS], peer, leaf.serial_number, expires, life_s, denied)


def trust_of(directory: Path) -> str:
    """Returns the trust domain of the certificate in a directory. Raises MaterialError."""
    leaf = _certificates(read_files(directory)[CERTIFICATE], CERTIFICATE)[0]
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise MaterialError(f"{CERTIFICATE}: has no subject alternative names") from None
    return next((uri.split("/")[2] for uri in names.get_values_for_type(x509.UniformResourceIdentifier)), DEFAULT_TRUST)


def _certificates(content: bytes, name: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise MaterialError(f"{name}: has no certificate in PEM form, or one that is damaged") from None


def _check_key(content: bytes, leaf: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise MaterialError(f"{KEY}: is no private key in PEM form without a password") from None
    if key.public_key() != leaf.public_key():
        raise MaterialError(f"{KEY}: is not the key of {CERTIFICATE}")


def _checked_leaf(leaf: x509.Certificate, trust: str, now: float) -> Peer:
    if _is_authority(leaf):
        raise MaterialError(f"{CERTIFICATE}: is the certificate of a CA")
    if not _begin(leaf) <= now < _end(leaf):
        raise MaterialError(f"{CERTIFICATE}: is valid from {when(_begin(leaf))} to {when(_end(leaf))}, not now")
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise MaterialError(f"{CERTIFICATE}: has no subject alternative names") from None
    uris, dns = names.get_values_for_type(x509.UniformResourceIdentifier), names.get_values_for_type(x509.DNSName)
    peer = read_uri(uris[0], trust) if len(uris) == 1 else None
    if peer is None:
        raise MaterialError(
            f"{CERTIFICATE}: must have exactly one URI, spiffe://{trust}/ROLE/NAME; it has {uris[:3] or 'none'}"
        )
    if any("*" in name for name in dns):
        raise MaterialError(f"{CERTIFICATE}: has a name with a wildcard")
    if missing := [name for name in peer.dns_names(trust) if name not in dns]:
        raise MaterialError(f"{CERTIFICATE}: lacks the DNS name {missing[0]}, which those demand that dial {peer}")
    return peer


def _check_chain(
    leaf: x509.Certificate, between: Sequence[x509.Certificate], roots: Sequence[x509.Certificate], now: float
) -> None:
    """Raises MaterialError unless signatures and dates lead from the leaf to one of the roots. Handshakes check the rest."""
    at, left = leaf, list(between)
    for _ in range(_MAX_CHAIN):
        if any(_issued(at, root) and _begin(root) <= now < _end(root) for root in roots):
            return
        issuer = next((each for each in left if _is_authority(each) and _issued(at, each)), None)
        if issuer is None or not _begin(issuer) <= now < _end(issuer):
            break
        left.remove(issuer)
        at = issuer
    raise MaterialError(f"{CERTIFICATE}: was not issued by a CA in {CAS} that is valid now")


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _denied(content: bytes) -> Denied:
    """Returns what the lines deny. Fingerprints may have colons, as openssl prints them."""
    fingerprints, peers = set(), set()
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        digest = entry.replace(":", "").lower()
        if _FINGERPRINT.fullmatch(digest):
            fingerprints.add(digest)
        elif entry:
            peers.add(_named(entry, number))
    return Denied(frozenset(fingerprints), frozenset(peers))


def _named(entry: str, number: int) -> str:
    role, _, name = entry.partition("/")
    try:
        return str(checked_peer(PeerRole(role), name))
    except ValueError:
        what = "is neither a SHA-256 fingerprint nor an identity such as node/ID"
        raise MaterialError(f"{DENIED}: line {number} {what}") from None


def fingerprint_of(certificate: bytes) -> str:
    """Returns the SHA-256 fingerprint of a certificate in PEM form."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))).hexdigest()


def _soonest(roots: Sequence[x509.Certificate], now: float) -> float:
    """Returns when the first CA ends that has not ended yet: one that was replaced may be left in the file."""
    ends = [_end(root) for root in roots]
    return min((end for end in ends if end > now), default=max(ends))


def _begin(certificate: x509.Certificate) -> float:
    return certificate.not_valid_before_utc.timestamp()


def _end(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


class LiveMaterial(LiveCertificates[Material]):
    """The set of a directory as it is now. A new one must be of the same peer.

    Raises MaterialError at first, if it cannot be used then.
    """

    def __init__(self, directory: Path, trust: str, metrics: TlsMetrics) -> None:
        self.trust = trust
        super().__init__(partial(read_files, directory), self._checked, metrics=metrics)

    def _checked(self, files: dict[str, bytes], before: Material | None) -> Material:
        new = checked_material(files, self.trust, time.time())
        if before is not None and new.peer != before.peer:
            raise MaterialError(f"{CERTIFICATE}: is of {new.peer}, not of {before.peer}")
        return new
