"""The certificate for clients: what is refused, and how a change is taken. No package besides `ssl` reads it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from prometheus_client import CollectorRegistry
from tests.public_certificates import CertificateFiles, PublicAuthority, key_pem, pem, replace

from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.auth.certificates.metrics import CertificateMetrics
from ryzanstein.auth.certificates.public import PublicCertificates


@pytest.fixture(scope="module")
def authority() -> PublicAuthority:
    return PublicAuthority()


@pytest.fixture
def files(authority: PublicAuthority, tmp_path: Path) -> CertificateFiles:
    return authority.write(tmp_path)


def opened(files: CertificateFiles, registry: CollectorRegistry | None = None) -> PublicCertificates:
    metrics = CertificateMetrics("test", registry or CollectorRegistry())
    return PublicCertificates(files.certificate, files.key, metrics)


def why(files: CertificateFiles) -> str:
    with pytest.raises(MaterialError) as caught:
        opened(files)
    return str(caught.value)


def test_a_pair_has_its_names_and_its_end(files: CertificateFiles) -> None:
    registry = CollectorRegistry()
    pair = opened(files, registry).current
    assert pair.names == ("localhost", "127.0.0.1", "0:0:0:0:0:0:0:1")
    left = registry.get_sample_value("ryzanstein_test_tls_expiry_seconds", {"file": "tls_cert"})
    assert left == pytest.approx(86_400, abs=60)
    assert b"PRIVATE" not in repr(pair).encode()


@pytest.mark.parametrize("key", [None, rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())])
def test_keys_of_public_cas_can_be_used(authority: PublicAuthority, tmp_path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    assert opened(authority.write(tmp_path, key=key)).current.names


def test_files_that_are_missing_or_no_certificates_are_named(files: CertificateFiles) -> None:
    replace(files.certificate, b"nothing")
    assert why(files) == f"{files.certificate}: must have 1 to 10 certificates in PEM form; it has 0"
    replace(files.certificate, b"-----BEGIN CERTIFICATE-----\nQUJD\n-----END CERTIFICATE-----\n")
    assert why(files) == f"{files.certificate}: has a certificate that is damaged"
    files.certificate.unlink()
    assert why(files) == f"{files.certificate}: No such file or directory"


def test_a_key_that_does_not_fit_is_named(authority: PublicAuthority, files: CertificateFiles) -> None:
    for other in (authority.leaf()[1], key_pem(rsa.generate_private_key(65537, 2048))):
        replace(files.key, other)
        assert why(files) == f"{files.key}: is not the key of the first certificate in {files.certificate}"
    replace(files.key, b"nothing")
    assert why(files) == f"{files.key}: is no private key in PEM form"


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: CertificateFiles) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    locked = key.private_bytes(serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"secret"))
    replace(files.key, locked)
    assert why(files) == f"{files.key}: has a password; this service has nobody to ask for it"


@pytest.mark.parametrize(("mode", "may"), [(0o600, True), (0o640, True), (0o440, True), (0o644, False), (0o604, False)])
def test_a_key_that_every_user_can_read_is_refused(files: CertificateFiles, mode: int, may: bool) -> None:
    files.key.chmod(mode)
    if may:
        opened(files)
    else:
        assert why(files) == f"{files.key}: every user can read this private key; chmod 0600 it"


@pytest.mark.parametrize(
    ("life", "names", "expected"),
    [
        (timedelta(seconds=-1), ("localhost",), "clients would refuse it: certificate has expired"),
        (timedelta(days=1), (), "has no subject alternative name, without which clients trust no certificate"),
    ],
)
def test_what_clients_would_refuse_is_refused(
    authority: PublicAuthority, tmp_path: Path, life: timedelta, names: tuple[str, ...], expected: str
) -> None:
    files = authority.write(tmp_path, names, life=life)
    assert why(files) == f"{files.certificate}: {expected}"


def test_a_weak_key_is_refused(authority: PublicAuthority, tmp_path: Path) -> None:
    files = authority.write(tmp_path, key=rsa.generate_private_key(65537, 1024))
    assert "too weak" in why(files)


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP521R1()), ed25519.Ed25519PrivateKey.generate()])
def test_a_key_that_grpc_does_not_know_is_refused(authority: PublicAuthority, tmp_path: Path, key: Any) -> None:
    files = authority.write(tmp_path, key=key)
    assert why(files) == f"{files.certificate}: must have an RSA, P-256 or P-384 key: gRPC has no others"


def test_a_chain_must_lead_from_its_first_certificate(authority: PublicAuthority, tmp_path: Path) -> None:
    below = PublicAuthority(authority)
    files = below.write(tmp_path)
    leaf = files.certificate.read_bytes()
    replace(files.certificate, leaf + pem(below.certificate))
    assert opened(files).current.names
    replace(files.certificate, leaf + pem(PublicAuthority().certificate))
    assert "clients would refuse it: unable to get local issuer certificate" in why(files)
    replace(files.certificate, pem(below.certificate) + leaf)
    assert "is not the key of the first certificate" in why(files)


async def test_a_new_pair_is_taken_and_one_that_cannot_be_used_leaves_the_one_before(
    authority: PublicAuthority, files: CertificateFiles
) -> None:
    registry = CollectorRegistry()
    live = opened(files, registry)
    first, seen = live.current, []
    live.observe(seen.append)
    authority.write(files.certificate.parent, ("new.example",))
    await live.look()
    assert live.current.names == ("new.example",)
    assert seen == [live.current]
    replace(files.certificate, first.chain)  # with the key of the other
    for failed in (0, 1, 1):
        await live.look()
        assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "failed"}) == failed
    assert live.current.names == ("new.example",)
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "ok"}) == 1


async def test_a_pair_that_is_replaced_file_by_file_is_no_failure(authority: PublicAuthority, files: CertificateFiles) -> None:
    registry = CollectorRegistry()
    live = opened(files, registry)
    certificate, key = authority.leaf(("new.example",))
    replace(files.key, key)
    await live.look()
    replace(files.certificate, certificate)
    await live.look()
    await live.look()
    assert live.current.names == ("new.example",)
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "failed"}) == 0


async def test_a_mounted_secret_is_read_from_one_folder(authority: PublicAuthority, tmp_path: Path) -> None:
    """As the kubelet does it: `tls.crt` is a link to `..data/tls.crt`, and `..data` is replaced at once."""
    mounted = tmp_path / "tls"

    def publish(version: str, name: str) -> None:
        written = authority.write(mounted / version, (name,))
        written.certificate.rename(mounted / version / "tls.crt")
        written.key.rename(mounted / version / "tls.key")
        link = mounted / "..new"
        link.symlink_to(version)
        os.replace(link, mounted / "..data")

    publish("..2026_1", "one.example")
    for name in ("tls.crt", "tls.key"):
        (mounted / name).symlink_to(Path("..data") / name)
    registry = CollectorRegistry()
    live = PublicCertificates(mounted / "tls.crt", mounted / "tls.key", CertificateMetrics("test", registry))
    for version in range(2, 6):
        publish(f"..2026_{version}", f"v{version}.example")
        await live.look()
        assert live.current.names == (f"v{version}.example",)
    assert registry.get_sample_value("ryzanstein_test_tls_reloads_total", {"outcome": "failed"}) == 0


async def test_a_certificate_that_expires_stays_until_there_is_another(authority: PublicAuthority, tmp_path: Path) -> None:
    files, registry = authority.write(tmp_path, life=timedelta(seconds=2)), CollectorRegistry()
    live = opened(files, registry)
    await asyncio.sleep(2.5)
    await live.look()
    assert live.current.chain == files.certificate.read_bytes()
    assert (registry.get_sample_value("ryzanstein_test_tls_expiry_seconds", {"file": "tls_cert"}) or 0) < 0
    authority.write(tmp_path, ("new.example",))
    await live.look()
    assert live.current.names == ("new.example",)
    assert live.current.expires["tls_cert"] > time.time()


def test_it_needs_no_package_of_the_extra_tls() -> None:
    code = "import sys; sys.modules['cryptography'] = None; import ryzanstein.rpc.tls.public_tls"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
