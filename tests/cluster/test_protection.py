"""`ryzanstein status` says which services strangers may use, and until when certificates are valid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = pytest.mark.cluster

NAMES = (ORCHESTRATOR, "node-0", "router-0")


def status(cluster: LocalCluster, *flags: str) -> subprocess.CompletedProcess[str]:
    """Asks at the addresses that it has on this machine."""
    addresses = [cluster.services[name].grpc_address.replace("0.0.0.0", "127.0.0.1") for name in (ORCHESTRATOR, "router-0")]
    command = [sys.executable, "-P", "-m", "ryzanstein.cli", "status", "--orchestrator", addresses[0], "--router", addresses[1]]
    env = {name: value for name, value in os.environ.items() if name != "RYZANSTEIN_TLS_DIR"} | {"COLUMNS": "200"}
    env |= {"RYZANSTEIN_TLS_DIR": str(cluster.tls_dir)} if cluster.tls_dir else {}
    return subprocess.run([*command, *flags], env=env, capture_output=True, text=True, timeout=60, check=False)


def protections(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    document = json.loads(status(cluster, "--json").stdout)
    (node,) = document["nodes"]
    told = {ORCHESTRATOR: document["orchestrator"], node["node"]["node_id"]: node, "router-0": document["router"]}
    return {name: each["protection"] for name, each in told.items()}


def rows(cluster: LocalCluster) -> dict[str, str]:
    """The lines of the table, by service."""
    _, _, table = status(cluster).stdout.partition("protection")
    return {name: line for line in table.splitlines() for name in NAMES if name in line.split()}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)


def test_who_listens_to_strangers_without_protection_says_so() -> None:
    everywhere = {name: {"host": "0.0.0.0"} for name in NAMES}
    spec = ClusterSpec(
        MODEL_DIR,
        num_nodes=1,
        tp=1,
        settings=everywhere,
        orchestrator_flags=("--insecure",),
        worker_flags=("--insecure", "--advertise-address", "127.0.0.1"),
        router_flags=("--insecure",),
    )
    with LocalCluster(spec) as cluster:
        told = protections(cluster)
        assert {name: (each["insecure"], each["tls"]) for name, each in told.items()} == dict.fromkeys(NAMES, (True, "off"))
        assert rows(cluster).keys() == set(NAMES)
        assert all("INSECURE" in line for line in rows(cluster).values())


def test_where_nobody_else_reaches_them_they_are_not_insecure() -> None:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as cluster:
        told = protections(cluster)
        assert [(each["insecure"], each["tls"], each["certificate_expires"]) for each in told.values()] == [
            (False, "off", 0)
        ] * 3
        assert "INSECURE" not in status(cluster).stdout


def test_with_tls_each_says_when_its_certificate_expires_and_late_renewals_are_problems(tmp_path: Path) -> None:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, secure=True, state_dir=tmp_path)) as cluster:
        for each in protections(cluster).values():
            assert (each["insecure"], each["tls"]) == (False, "require")
            assert each["certificate_expires"] - time.time() == pytest.approx(30 * 86400, abs=120)
            assert each["certificate_life_s"] == pytest.approx(30 * 86400 + 300, abs=5)
        assert rows(cluster).keys() == set(NAMES)
        assert all("expires in 30.0 days" in line for line in rows(cluster).values())
        assert status(cluster).stdout.startswith("no problems")
        Authority.open(tmp_path / "tls").write(
            Peer(PeerRole.NODE, "node-0"), tmp_path / "tls" / "node-0", life=timedelta(seconds=60), renew=True
        )
        until(lambda: "the certificate of node-0 expires in 0.0 hours" in status(cluster).stdout)
