"""Certificates of servers for clients, as a public CA issues them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

NAMES = ("localhost", "127.0.0.1", "::1")
_Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: _Key) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The files of a server, and the CA that clients trust."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.certificate), "--tls-key", str(self.key)


class PublicAuthority:
    """A CA for servers. Unlike ours it knows no roles, and may have another one above it."""

    def __init__(self, above: PublicAuthority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"CA {'below' if above else 'of tests'}")])
        made = _builder(self.key, name, (), timedelta(days=30), authority=True)
        made = made.issuer_name(name if above is None else above.certificate.subject)
        self.certificate = made.sign(self.key if above is None else above.key, hashes.SHA256())

    def leaf(
        self, names: Sequence[str] = NAMES, *, life: timedelta = timedelta(days=1), key: _Key | None = None
    ) -> tuple[bytes, bytes]:
        """Returns a certificate and its key in PEM."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        made = _builder(key, x509.Name([]), names, life, authority=False).issuer_name(self.certificate.subject)
        return pem(made.sign(self.key, hashes.SHA256())), key_pem(key)

    def write(
        self, folder: Path, names: Sequence[str] = NAMES, *, life: timedelta = timedelta(days=1), key: _Key | None = None
    ) -> CertificateFiles:
        """Writes a pair and the CA's certificate into a folder. Each file is replaced as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        certificate, private = self.leaf(names, life=life, key=key)
        replace(folder / "server.key", private)
        replace(folder / "server.pem", certificate)
        replace(folder / "ca.pem", pem(self.certificate))
        return CertificateFiles(folder / "server.pem", folder / "server.key", folder / "ca.pem")


def replace(path: Path, content: bytes) -> None:
    """Writes a file that nobody sees in part, mode 0600."""
    new = path.with_name(f".{path.name}")
    new.touch(0o600)
    new.write_bytes(content)
    new.replace(path)


def _builder(
    key: _Key, subject: x509.Name, names: Sequence[str], life: timedelta, *, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(min(now, now + life) - timedelta(minutes=1))
    builder = builder.not_valid_after(now + life)
    builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([_name(each) for each in names]), critical=True)
    return builder


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
