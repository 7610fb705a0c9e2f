"""Certificates in a directory: what is refused, and how a change is taken."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client import CollectorRegistry

from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.peers.authority import Authority, AuthorityError
from ryzanstein.auth.peers.material import LiveMaterial, Material, fingerprint_of, read_material
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole

NODE = Peer(PeerRole.NODE, "n-1")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.new(DEFAULT_TRUST)


@pytest.fixture
def folder(authority: Authority, tmp_path: Path) -> Path:
    authority.write(NODE, tmp_path / "tls")
    return tmp_path / "tls"


def read(folder: Path, at: float | None = None) -> Material:
    return read_material(folder, DEFAULT_TRUST, at or time.time())


def live(folder: Path) -> tuple[LiveMaterial, CollectorRegistry]:
    registry = CollectorRegistry()
    return LiveMaterial(folder, DEFAULT_TRUST, TlsMetrics("test", registry)), registry


def certified(authority: Authority, folder: Path, *names: x509.GeneralName, ca: bool = False) -> None:
    """Writes a certificate that the CA's own code would not make."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority._certificate.subject)
    builder = builder.public_key(key.public_key()).serial_number(7).not_valid_before(now).not_valid_after(now + timedelta(1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    certificate = builder.sign(authority._key, hashes.SHA256())
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def test_a_set_that_was_issued_is_taken_and_says_whose_it_is(folder: Path) -> None:
    material = read(folder)
    assert material.peer == NODE
    assert material.expires["tls.crt"] - time.time() == pytest.approx(30 * 86400, abs=10)
    assert material.life_s == pytest.approx(30 * 86400 + 300, abs=1), "back-dated by 5 minutes"
    assert "PRIVATE" not in repr(material)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_file_that_lacks_or_is_damaged_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"nothing")
    with pytest.raises(MaterialError, match=name):
        read(folder)
    (folder / name).unlink()
    with pytest.raises(MaterialError, match=name):
        read(folder)


def test_a_key_that_everybody_can_read_is_refused_and_one_for_the_group_is_not(folder: Path) -> None:
    (folder / "tls.key").chmod(0o644)
    with pytest.raises(MaterialError, match="every user can read"):
        read(folder)
    (folder / "tls.key").chmod(0o440)
    read(folder)


def test_the_key_of_another_certificate_is_refused(folder: Path, authority: Authority) -> None:
    (folder / "tls.key").write_bytes(authority.issue(NODE).key)
    with pytest.raises(MaterialError, match="is not the key"):
        read(folder)


def test_a_foreign_ca_and_times_outside_the_certificates_are_refused(folder: Path) -> None:
    ours = (folder / "ca.crt").read_bytes()
    for days in (-1, 31, 4000):
        with pytest.raises(MaterialError, match="not now"):
            read(folder, time.time() + days * 86400)
    foreign = Authority.new(DEFAULT_TRUST).certificate
    (folder / "ca.crt").write_bytes(foreign)
    with pytest.raises(MaterialError, match="not issued by a CA"):
        read(folder)
    (folder / "ca.crt").write_bytes(foreign + ours)
    read(folder)


URI = x509.UniformResourceIdentifier(NODE.uri(DEFAULT_TRUST))
DNS = [x509.DNSName(name) for name in NODE.dns_names(DEFAULT_TRUST)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no subject alternative names"),
        (DNS, "exactly one URI"),
        ([URI, x509.UniformResourceIdentifier("spiffe://ryzanstein.internal/operator/me"), *DNS], "exactly one URI"),
        ([x509.UniformResourceIdentifier("spiffe://other/node/n-1"), *DNS], "exactly one URI"),
        ([URI, *DNS, x509.DNSName("*.node.ryzanstein.internal")], "wildcard"),
        ([URI, DNS[1]], "lacks the DNS name n-1.node"),
        ([URI], "lacks the DNS name"),
    ],
)
def test_a_certificate_with_the_wrong_names_is_refused(
    authority: Authority, folder: Path, names: list[x509.GeneralName], why: str
) -> None:
    certified(authority, folder, *names)
    with pytest.raises(MaterialError, match=why):
        read(folder)


def test_a_certificate_of_a_ca_is_no_services(authority: Authority, folder: Path) -> None:
    certified(authority, folder, URI, *DNS, ca=True)
    with pytest.raises(MaterialError, match="certificate of a CA"):
        read(folder)
    certified(authority, folder, URI, *DNS)
    read(folder)


def test_denied_are_fingerprints_and_identities(folder: Path) -> None:
    certificate = (folder / "tls.crt").read_bytes()
    digest = fingerprint_of(certificate)
    assert digest == x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()
    with_colons = ":".join(digest.upper()[i : i + 2] for i in range(0, 64, 2))
    (folder / "denied").write_text(f"# stolen\n{with_colons}  # n-1\nnode/n-2\n\norchestrator\n")
    denied = read(folder).denied
    assert denied.denies(Peer(PeerRole.ROUTER, "r"), certificate)
    assert denied.denies(Peer(PeerRole.NODE, "n-2"))
    assert denied.denies(Peer(PeerRole.ORCHESTRATOR))
    assert not denied.denies(Peer(PeerRole.ROUTER, "n-2"), ssl.DER_cert_to_PEM_cert(b"another").encode())
    (folder / "denied").write_text("node/n-2\nnonsense\n")
    with pytest.raises(MaterialError, match="line 2"):
        read(folder)


async def test_a_change_is_taken_whole_and_what_cannot_be_used_is_not(folder: Path, authority: Authority) -> None:
    material, registry = live(folder)
    seen: list[Material] = []
    material.observe(seen.append)
    first = material.current
    await material.look()
    assert seen == []

    authority.write(NODE, folder, renew=True)
    await material.look()
    assert material.current is seen[0] is not first
    assert material.version == 1

    (folder / "tls.key").write_bytes(b"nothing")
    for _ in range(4):
        await material.look()
    assert material.current is seen[0]
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "failed"}) == 1
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "ok"}) == 1
    left = registry.get_sample_value("ryzanstein_test_tls_expiry_seconds", {"file": "tls.crt"})
    assert left == pytest.approx(30 * 86400, abs=10)

    authority.write(Peer(PeerRole.NODE, "n-2"), folder, renew=True)
    await material.look()
    assert material.current.peer == NODE, "a running service does not become another one"


async def test_files_that_are_replaced_one_by_one_count_as_no_failure(folder: Path, authority: Authority) -> None:
    material, registry = live(folder)
    issued = authority.issue(NODE)
    (folder / "tls.key").write_bytes(issued.key)
    await material.look()
    (folder / "tls.crt").write_bytes(issued.certificate)
    await material.look()
    assert material.version == 1
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "failed"}) == 0


async def test_a_secret_of_kubernetes_is_replaced_at_once(authority: Authority, tmp_path: Path) -> None:
    mount = tmp_path / "mount"

    def publish(version: str) -> None:
        authority.write(NODE, mount / version)
        os.symlink(version, mount / "..new")
        os.replace(mount / "..new", mount / "..data")

    publish("..1")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        os.symlink(f"..data/{name}", mount / name)
    material, _ = live(mount)
    first = material.current.serial
    publish("..2")
    await material.look()
    assert material.current.serial != first


@pytest.mark.parametrize(
    "act",
    [
        lambda authority, folder: authority.save(folder.parent),
        lambda authority, folder: authority.write(NODE, folder),
    ],
)
def test_nothing_is_overwritten(authority: Authority, folder: Path, act: Callable[[Authority, Path], None]) -> None:
    authority.save(folder.parent)
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    with pytest.raises(AuthorityError):
        act(authority, folder)
    assert {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()} == before


def test_a_ca_is_opened_again_and_a_renewed_certificate_keeps_its_cas(authority: Authority, folder: Path) -> None:
    authority.save(folder.parent)
    again = Authority.open(folder.parent)
    assert again.trust == DEFAULT_TRUST
    both = (folder / "ca.crt").read_bytes() + Authority.new(DEFAULT_TRUST).certificate
    (folder / "ca.crt").write_bytes(both)
    serial = read(folder).serial
    again.write(again.peer_in(folder), folder, renew=True)
    assert (folder / "ca.crt").read_bytes() == both
    assert read(folder).serial != serial
    assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600
