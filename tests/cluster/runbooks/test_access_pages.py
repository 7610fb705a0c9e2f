"""The pages of certificates and limits are tried as the others are: the fault is real, and so is each command."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status.scrape import total
from ryzanstein.v1 import orchestrator_pb2
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

pytestmark = [pytest.mark.timeout(240)]

NODE, ORCHESTRATOR, THIEF = Peer(PeerRole.NODE, "node-0"), Peer(PeerRole.ORCHESTRATOR), Peer(PeerRole.NODE, "thief")


@pytest.fixture(scope="module")
def secure(make_world: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node and a router that talk with TLS alone."""
    with make_world(num_nodes=1, tp=1, secure=True, state_dir=tmp_path_factory.mktemp("secure")) as world:
        yield world


def folder(world: Any, name: str) -> Path:
    return Path(world.cluster.state_dir) / "tls" / name


def variables(world: Any, name: str) -> dict[str, str]:
    """Those of pages that are about the certificate of a service."""
    own = {"TLS_DIR": str(folder(world, name)), "CA": str(folder(world, "")), "RYZANSTEIN_TLS_DIR": str(world.cluster.tls_dir)}
    return dict(world.variables("node-0", **own))


def test_certificate_expires(secure: Any, walk: Any) -> None:
    """A third of its life is left, and the next one came without its key."""
    authority = Authority.open(folder(secure, ""))
    metrics = secure.cluster.services["node-0"].metrics_url

    def strike() -> None:
        authority.write(NODE, folder(secure, "node-0"), life=timedelta(seconds=120), renew=True)
        until = time.monotonic() + 10
        while total(metrics, "ryzanstein_worker_tls_life_seconds") > 1000:
            assert time.monotonic() < until, "the certificate was not taken"
            time.sleep(0.1)
        (folder(secure, "node-0") / "tls.crt").write_bytes(authority.issue(NODE).certificate)

    walk(secure, "certificate-expires", variables(secure, "node-0")).run(strike=strike)


def test_peer_refused(secure: Any, walk: Any) -> None:
    """Somebody has a node's certificate, and deploys with it."""
    authority, stolen = Authority.open(folder(secure, "")), threading.Event()
    issued = authority.issue(THIEF)

    def steal() -> None:
        credentials = grpc.ssl_channel_credentials(authority.certificate, issued.key, issued.certificate)
        options = (("grpc.ssl_target_name_override", ORCHESTRATOR.server_name(DEFAULT_TRUST)),)
        with grpc.secure_channel(secure.cluster.orchestrator_address, credentials, options) as channel:
            while not stolen.wait(0.3):
                with suppress(grpc.RpcError):
                    OrchestratorServiceStub(channel).DeployModel(orchestrator_pb2.DeployModelRequest(), timeout=5)

    thief = threading.Thread(target=steal)

    def heal() -> None:
        stolen.set()
        thief.join(10)

    try:
        walk(secure, "peer-refused", variables(secure, "orchestrator")).run(strike=thief.start, heal=heal)
    finally:
        heal()


def test_limits_degraded(make_world: Any, walk: Any, part: Callable[[str], str], tmp_path: Path) -> None:
    server = part("redis-server")
    (port,) = free_ports(1)
    command = (server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--appendonly", "yes")
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    router = ("--session-store", "redis", "--redis-url", f"redis://127.0.0.1:{port}/0")
    try:
        with make_world(num_nodes=1, tp=1, router_flags=router) as world:
            own = world.variables("node-0", REDIS_PORT=str(port), REDIS_DIR=str(tmp_path))

            def strike() -> None:
                redis.kill()
                redis.wait()

            walk(world, "limits-degraded", own).run(strike=strike)
    finally:
        redis.kill()
        redis.wait()
        with suppress(OSError, ValueError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
