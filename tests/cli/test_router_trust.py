"""Routers with TLS, as commands see them: which files they refuse, and a local cluster of such routers."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer
from tests.public_certificates import PublicAuthority, replace

from ryzanstein.cli.access.keyed_router import keyed_router
from ryzanstein.cli.access.router_trust import RouterTls
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.up.command import addresses
from ryzanstein.demo import MODEL_DIR


@pytest.fixture(scope="module")
def authority() -> PublicAuthority:
    return PublicAuthority()


def test_without_files_there_is_no_tls() -> None:
    assert RouterTls.given(None, None, None) is None
    assert keyed_router("127.0.0.1:1", None, None).trust is None


def test_files_that_cannot_be_used_are_refused_by_name(authority: PublicAuthority, tmp_path: Path) -> None:
    files = authority.write(tmp_path)
    with pytest.raises(typer.BadParameter, match="give both"):
        RouterTls.given(files.certificate, None, None)
    with pytest.raises(typer.BadParameter, match=r"does not vouch for .*unable to get local issuer certificate"):
        RouterTls.given(files.certificate, files.key, None)
    with pytest.raises(typer.BadParameter, match="has no certificate in PEM form"):
        keyed_router("127.0.0.1:1", None, files.key)
    with pytest.raises(typer.BadParameter, match="cannot be read: No such file"):
        keyed_router("127.0.0.1:1", None, tmp_path / "nothing")
    replace(files.key, authority.leaf()[1])
    with pytest.raises(typer.BadParameter, match="is not the key of"):
        RouterTls.given(files.certificate, files.key, files.ca)


@pytest.mark.cluster
def test_a_local_cluster_has_routers_with_tls(authority: PublicAuthority, tmp_path: Path) -> None:
    """The certificate is for a name of its own, as that of a public CA would be."""
    files = authority.write(tmp_path / "tls", ("router.example", "127.0.0.1"))
    tls = RouterTls.given(files.certificate, files.key, files.ca)
    spec = ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, state_dir=tmp_path / "state", router_tls=tls)
    with LocalCluster(spec) as cluster:
        said = addresses(cluster)
        assert said["ca"] == str(files.ca)
        assert said["http"] == [cluster.http_url]
        assert cluster.http_url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(files.ca))
        assert httpx.get(f"{cluster.http_url}/healthz", verify=trusting, trust_env=False).status_code == 200
        command = [sys.executable, "-m", "ryzanstein.cli", "chat", "--json", "--router", cluster.router_address, "hi"]
        done = subprocess.run([*command, "--ca", str(files.ca)], capture_output=True, text=True, timeout=60, check=False)
        assert json.loads(done.stdout)["text"], done.stderr
        lost = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert lost.returncode == 1
        assert "does it speak TLS? --ca names" in lost.stderr
