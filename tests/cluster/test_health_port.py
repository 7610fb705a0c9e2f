"""Probes of a cluster whose services talk with TLS alone: they have no certificate, and get health and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import router_pb2, worker_pb2
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.router_pb2_grpc import RouterServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.cluster

NAMES = (ORCHESTRATOR, "node-0", "router-0")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return dict(zip(NAMES, free_ports(len(NAMES)), strict=True))


@pytest.fixture(scope="module")
def cluster(ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(
        MODEL_DIR,
        num_nodes=1,
        tp=1,
        secure=True,
        state_dir=tmp_path_factory.mktemp("probed"),
        settings={name: {"health_port": port} for name, port in ports.items()},
        worker_flags=("--drain-grace-s", "30"),
        router_flags=("--drain-grace-s", "30"),
    )
    with LocalCluster(spec) as started:
        yield started


@pytest.fixture
def probe(cluster: LocalCluster, ports: dict[str, int]) -> Callable[..., int]:
    """Checks one health service as kubelet does: a new connection without TLS."""

    def check(name: str, service: str = "readiness") -> int:
        with grpc.insecure_channel(f"127.0.0.1:{ports[name]}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
            return int(HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)

    return check


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_without_a_certificate_sees_life_start_and_readiness(probe: Callable[..., int], name: str) -> None:
    assert [probe(name, service) for service in ("", "startup", "readiness")] == [SERVING] * 3


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_service_is_there(cluster: LocalCluster, ports: dict[str, int], name: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{ports[name]}") as channel:
        for call in (
            lambda: RouterServiceStub(channel).GetRouterStatus(router_pb2.GetRouterStatusRequest(), timeout=10),
            lambda: InferenceServiceStub(channel).ListModels(inference.ListModelsRequest(), timeout=10),
            lambda: WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=10),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> float:
    started = time.monotonic()
    while not holds():
        assert time.monotonic() < started + timeout_s, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - started


def answer(cluster: LocalCluster, channel: grpc.Channel) -> Iterator[inference.StreamChatResponse]:
    """Returns a stream of 1,900 tokens that has begun."""
    message = inference.Message(role=inference.ROLE_USER, content="Count from 1 to 9.")
    sampling = inference.SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    request = inference.StreamChatRequest(chat=inference.ChatRequest(messages=[message], sampling=sampling))
    stream = InferenceServiceStub(channel).StreamChat(request, timeout=60)
    next(stream)
    return stream


@pytest.mark.parametrize("name", ["node-0", "router-0"])
def test_a_drain_is_seen_at_once_while_an_answer_goes_on(cluster: LocalCluster, probe: Callable[..., int], name: str) -> None:
    until(lambda: probe("router-0") == SERVING)
    with grpc.insecure_channel(cluster.router_address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        stream = answer(cluster, channel)
        cluster.kill(name, signal.SIGTERM)
        assert until(lambda: probe(name) == NOT_SERVING) < 1.0
        events = list(stream)
    assert events[-1].event.finished.usage.completion_tokens == 1900
    assert cluster.services[name].wait_ended(20)
    cluster.restart(name)
    cluster.wait_nodes(1)
    assert probe(name) == SERVING


def test_a_node_drains_itself_with_its_own_certificate_as_its_pod_does(
    cluster: LocalCluster, probe: Callable[..., int]
) -> None:
    """The preStop hook of the component tls. The certificate of another node, or of a router, does not do."""
    authority, other = Authority.open(cluster.state_dir / "tls"), cluster.state_dir / "other"
    authority.write(Peer(PeerRole.NODE, "node-9"), other)
    address = cluster.services["node-0"].grpc_address

    def drain(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "ryzanstein.cli", "drain", "--force", "--direct", address, "--grace", "30"]
        env = {**os.environ, "RYZANSTEIN_TLS_DIR": str(folder)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    for folder in (other, cluster.state_dir / "tls" / "router-0"):
        refused = drain(folder)
        assert (refused.returncode, "ROLE_NOT_ALLOWED" in refused.stderr) == (1, True), refused.stderr
    assert probe("node-0") == SERVING
    done = drain(cluster.state_dir / "tls" / "node-0")
    assert done.returncode == 0, done.stderr
    until(lambda: probe("node-0") == NOT_SERVING)
    assert probe("node-0", "") == SERVING, "a node that drains lives"
    cluster.restart("node-0")
    cluster.wait_nodes(1)
