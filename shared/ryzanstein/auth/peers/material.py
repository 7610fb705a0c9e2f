"""A service's certificate, key and CAs, read from a directory as one set that was checked.

The directory has `tls.crt` (the certificate, perhaps with intermediate ones), `tls.key`, `ca.crt`
(one CA or several, while they are changed), and perhaps `denied`: a line for each SHA-256 fingerprint
or identity, such as `node/n-1`, that is not trusted any more. Needs the package `cryptography`.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole, checked_peer, read_uri

log = structlog.get_logger(__name__)

CERTIFICATE, KEY, CAS, DENIED = "tls.crt", "tls.key", "ca.crt", "denied"
LOOK_S = 1.0
_MAX_FILE_BYTES = 2**20
_MAX_CHAIN = 5
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class MaterialError(ValueError):
    """A set of files cannot be used. The message names the file and says why."""


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


def read_material(directory: Path, trust: str, now: float) -> Material:
    """Returns the set in a directory. Raises MaterialError."""
    return checked_material(read_files(directory), trust, now)


def read_files(directory: Path) -> dict[str, bytes]:
    """Returns the content of the files by name, `denied` only if it is there. Raises MaterialError.

    Kubernetes replaces the directory `..data` at once, so all files are read from one.
    """
    data = directory / "..data"
    folder = data.resolve() if data.exists() else directory.resolve()
    files = {name: _read(folder / name) for name in (CERTIFICATE, KEY, CAS)}
    if (folder / DENIED).exists():
        files[DENIED] = _read(folder / DENIED)
    return files


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise MaterialError(f"{path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise MaterialError(f"{path}: has more than {_MAX_FILE_BYTES} bytes")
    if path.name == KEY and mode & 0o007:
        raise MaterialError(f"{path}: every user can read this private key; chmod 0600 it")
    return content


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
        raise MaterialError(f"{CERTIFICATE}: is valid from {_when(_begin(leaf))} to {_when(_end(leaf))}, not now")
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


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="minutes")


class LiveMaterial:
    """The set of a directory as it is now: looked at each second, and kept where a new one cannot be used.

    Raises MaterialError at first, if it cannot be used then.
    """

    def __init__(self, directory: Path, trust: str, metrics: TlsMetrics) -> None:
        self.trust = trust
        self._directory, self._metrics = directory, metrics
        self._content = read_files(directory)
        self.current = checked_material(self._content, trust, time.time())
        self.version = 0
        """Counts the sets: a channel of an earlier one is to be replaced."""
        self._observers: list[Callable[[Material], None]] = []
        self._failed: object = None
        metrics.expire(self.current.expires, self.current.life_s)

    def observe(self, changed: Callable[[Material], None]) -> None:
        """Calls `changed` with each new set, in the loop. It must neither block nor raise."""
        self._observers.append(changed)

    async def run(self) -> None:
        """Looks for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Takes a new set if there is one that can be used.

        Files may be replaced one by one, so a set that cannot be used counts as failed only if it is
        still the same at the next look.
        """
        content: dict[str, bytes] | str
        try:
            content = await asyncio.to_thread(read_files, self._directory)
            if content == self._content:
                self._failed = None
                return
            material = checked_material(content, self.trust, time.time())
            if material.peer != self.current.peer:
                raise MaterialError(f"{CERTIFICATE}: is of {material.peer}, not of {self.current.peer}")
        except MaterialError as error:
            self._on_failure(str(error))
            return
        self._content, self.current, self._failed = content, material, None
        self.version += 1
        self._metrics.reloads.labels("ok").inc()
        self._metrics.expire(material.expires, material.life_s)
        log.info(
            "certificates changed",
            peer=str(material.peer),
            serial=f"{material.serial:x}",
            expires=_when(material.expires[CERTIFICATE]),
        )
        for changed in self._observers:
            changed(material)

    def _on_failure(self, why: str) -> None:
        before, self._failed = self._failed, (why, True)
        if before == (why, True):
            self._failed = (why, False)
            self._metrics.reloads.labels("failed").inc()
            log.error("new certificates cannot be used, the ones before are kept", error=why)
        elif before == (why, False):
            self._failed = before
