"""A small CA for the services of a cluster: a directory with its key and certificate.

It issues certificates of 30 days with P-256 keys. Everything that it writes, it writes under new names
and renames, so a service that reads meanwhile sees whole files. Needs the package `cryptography`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ryzanstein.auth.peers.material import CAS, CERTIFICATE, KEY
from ryzanstein.auth.peers.peer import Peer, checked_trust, read_uri
from ryzanstein.files.private_files import private_folder

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
LEAF_LIFE, CA_LIFE = timedelta(days=30), timedelta(days=3650)
BACKDATED = timedelta(minutes=5)
"""Clocks of other machines may be behind by this much."""


class AuthorityError(Exception):
    """The CA cannot do this. The message is a sentence for people."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, in PEM form."""

    certificate: bytes
    key: bytes
    ends: datetime


class Authority:
    """A CA: its certificate, its key, and the trust domain that it issues for, which is in its name."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key
        self.trust = checked_trust(_organization(certificate))

    @classmethod
    def new(cls, trust: str, life: timedelta = CA_LIFE) -> Authority:
        """Returns a new CA. Raises ValueError for what is no trust domain."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, checked_trust(trust)),
                x509.NameAttribute(NameOID.COMMON_NAME, "Ryzanstein CA"),
            ]
        )
        builder = _builder(name, name, key, life)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(authority=True), critical=True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """Returns the CA in a directory. Raises AuthorityError."""
        try:
            certificate = x509.load_pem_x509_certificate((directory / CA_CERTIFICATE).read_bytes())
            key = serialization.load_pem_private_key((directory / CA_KEY).read_bytes(), password=None)
        except OSError as error:
            raise AuthorityError(f"{error.filename}: {error.strerror}; `ryzanstein ca init {directory}` makes a CA") from None
        except (ValueError, TypeError):
            raise AuthorityError(f"{directory}: has a certificate or key that is damaged") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AuthorityError(f"{directory}: {CA_KEY} is not the key of {CA_CERTIFICATE}")
        try:
            return cls(certificate, key)
        except ValueError:
            raise AuthorityError(f"{directory}: {CA_CERTIFICATE} is not the certificate of a CA that `ca init` made") from None

    @property
    def certificate(self) -> bytes:
        """The CA's certificate in PEM form."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def save(self, directory: Path) -> None:
        """Writes the CA into a directory. Raises AuthorityError if one is there."""
        if (directory / CA_KEY).exists() or (directory / CA_CERTIFICATE).exists():
            raise AuthorityError(f"{directory}: has a CA already; every service trusts it, so it is never overwritten")
        try:
            private_folder(directory)
            _write(directory / CA_KEY, _key_pem(self._key), 0o600)
            _write(directory / CA_CERTIFICATE, self.certificate, 0o644)
        except OSError as error:
            raise AuthorityError(f"{error.filename}: {error.strerror}") from None

    def issue(self, peer: Peer, life: timedelta = LEAF_LIFE) -> Issued:
        """Returns a new certificate with a new key."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(x509.Name([]), self._certificate.subject, key, life)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(peer.uri(self.trust))]
        names += [x509.DNSName(name) for name in peer.dns_names(self.trust)]
        # Critical, as RFC 5280 wants it of a certificate without a subject.
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(authority=False), critical=True)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if peer.dns_names(self.trust) else [])]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = builder.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key), certificate.not_valid_after_utc)

    def write(self, peer: Peer, directory: Path, *, life: timedelta = LEAF_LIFE, renew: bool = False) -> datetime:
        """Issues a certificate into a directory and returns when it ends. Raises AuthorityError.

        A certificate that is there is only overwritten with `renew`, and then keeps its `ca.crt`,
        which may have further CAs.
        """
        if not renew and (there := [name for name in (CERTIFICATE, KEY) if (directory / name).exists()]):
            raise AuthorityError(
                f"{directory / there[0]} exists; `ryzanstein ca renew` replaces a certificate by one of the same name"
            )
        issued = self.issue(peer, life)
        try:
            private_folder(directory)
            if not (renew and (directory / CAS).exists()):
                _write(directory / CAS, self.certificate, 0o644)
            _write(directory / KEY, issued.key, 0o600)
            _write(directory / CERTIFICATE, issued.certificate, 0o644)
        except OSError as error:
            raise AuthorityError(f"{error.filename}: {error.strerror}") from None
        return issued.ends

    def peer_in(self, directory: Path) -> Peer:
        """Returns the peer of the certificate in a directory. Raises AuthorityError."""
        path = directory / CERTIFICATE
        try:
            leaf = x509.load_pem_x509_certificates(path.read_bytes())[0]
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except OSError as error:
            raise AuthorityError(f"{path}: {error.strerror}") from None
        except (ValueError, x509.ExtensionNotFound):
            raise AuthorityError(f"{path}: is not a certificate of a service") from None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        peer = read_uri(uris[0], self.trust) if len(uris) == 1 else None
        if peer is None:
            raise AuthorityError(f"{path}: is not a certificate for {self.trust}")
        return peer


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - BACKDATED).not_valid_after(now + life)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _organization(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(found[0].value) if found else ""


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file under a temporary name, with its mode from the start, and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
