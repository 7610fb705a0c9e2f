"""Membership between versions: nodes of the earlier one at an orchestrator of today, and the other way round."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.compat.conftest import WAIT_S, Line, Peer, Processes

from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.long

BEAT = {"sequence": 1, "state": "NODE_STATE_READY", "model": "demo", "context_length": 2048, "load": {"capacity": 8}}


def started_orchestrator(processes: Processes, tmp_path: Path) -> ServiceProcess:
    return processes.service("orchestrator", "orchestrator", database=str(tmp_path / "o.sqlite"))


def joined(processes: Processes, address: str, version: str) -> tuple[Peer, dict[str, Any]]:
    """Registers a node and opens its beats; returns the stream and a beat to repeat."""
    node = {"node_id": "other", "address": "127.0.0.1:1", "incarnation": "1", "tp": 1}
    grant = processes.call(address, "OrchestratorService/RegisterNode", version, node=node).until(
        lambda line: "lease_id" in line
    )
    beat = {"node_id": "other", "lease_id": grant[-1]["lease_id"], "beat": BEAT}
    return processes.call(address, "OrchestratorService/Heartbeat", version, **beat), beat


def answered(beats: Peer, beat: dict[str, Any], holds: Any) -> Line:
    """Beats until the answer is as it should be; returns it."""
    deadline = time.monotonic() + WAIT_S
    beats.send(**beat)
    while not holds(answer := beats.until(lambda line: "unknown" in line)[-1]):
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
        beats.send(**beat)
    return answer


@pytest.mark.parametrize("version", ["earlier", "newer"])
def test_a_node_of_another_version_is_a_member_and_gets_its_deployment(
    processes: Processes, tmp_path: Path, version: str
) -> None:
    address = started_orchestrator(processes, tmp_path).grpc_address
    beats, beat = joined(processes, address, version)
    answered(beats, beat, lambda answer: "deployment" not in answer)
    watch = processes.call(address, "OrchestratorService/WatchCluster", "earlier", watcher_id="w")
    (node,) = watch.until(lambda line: "snapshot" in line)[-1]["snapshot"]["nodes"]
    assert (node["node_id"], node["model"], node["state"]) == ("other", "demo", "NODE_STATE_READY")
    with grpc.insecure_channel(address) as channel:
        stub = OrchestratorServiceStub(channel)
        deployment = orchestrator.Deployment(model="second", path="/models/second", replicas=1)
        stub.DeployModel(orchestrator.DeployModelRequest(deployment=deployment), timeout=10)
        answer = answered(beats, beat, lambda answer: "deployment" in answer)
        assert {"model": "second", "path": "/models/second"}.items() <= answer["deployment"].items()
        served = beat | {"beat": BEAT | {"model": "second"}}
        beats.send(**served)
        seen = watch.until(lambda line: line.get("delta", {}).get("node", {}).get("model") == "second")
        assert any("deployment" in line["delta"] for line in seen if "delta" in line)
        (status,) = stub.ListDeployments(orchestrator.ListDeploymentsRequest(), timeout=10).deployments
        assert list(status.assigned_nodes) == list(status.ready_nodes) == ["other"]
        stub.RemoveModel(orchestrator.RemoveModelRequest(model="second"), timeout=10)
    answered(beats, served, lambda answer: "deployment" not in answer)


def shows(node: ServiceProcess, model: str) -> None:
    """Returns when the node's first stream serves the model."""
    deadline = time.monotonic() + WAIT_S
    with grpc.insecure_channel(node.grpc_address) as channel:
        stub = WorkerServiceStub(channel)
        while True:
            beat = stub.GetStatus(worker.GetStatusRequest(), timeout=10).beat
            if (beat.model, beat.state) == (model, worker.NODE_STATE_READY):
                return
            assert time.monotonic() < deadline, f"{model!r} is not served: {beat}"
            time.sleep(0.05)


def test_a_node_of_today_follows_an_earlier_orchestrator(processes: Processes) -> None:
    other, address = processes.orchestrator()
    second = processes.copy_of_demo("second")
    node = processes.worker(orchestrator=address)
    registered = other.event("registered")["message"]
    assert registered["node_id"] == "today"
    assert other.event("beat")["message"]["beat"]["state"]
    shows(node, "demo")
    other.send(deployment={"model": "second", "path": str(second), "replicas": 1})
    shows(node, "second")
    other.until(lambda line: line["event"] == "beat" and line["message"]["beat"].get("model") == "second")
    other.send()
    shows(node, "demo")
    other.send(drain=True)
    other.until(lambda line: line["event"] == "beat" and line["message"]["beat"]["state"] == "NODE_STATE_DRAINING")


def test_the_further_models_stay_when_an_earlier_orchestrator_deploys(processes: Processes) -> None:
    other, address = processes.orchestrator()
    second, third = processes.copy_of_demo("second"), processes.copy_of_demo("third")
    node = processes.worker(orchestrator=address, more_models=str(third))
    shows(node, "demo")
    other.send(deployment={"model": "second", "path": str(second)})
    shows(node, "second")
    with grpc.insecure_channel(node.grpc_address) as channel:
        beat = WorkerServiceStub(channel).GetStatus(worker.GetStatusRequest(model="third"), timeout=10).beat
    assert (beat.model, beat.state) == ("third", worker.NODE_STATE_READY)


def test_a_node_of_today_follows_a_newer_orchestrator(processes: Processes) -> None:
    other, address = processes.orchestrator("newer")
    second = processes.copy_of_demo("second")
    node = processes.worker(orchestrator=address)
    shows(node, "demo")
    deployment = {"model": "second", "path": str(second), "revision": 1}
    other.send(plural=True, deployment=deployment, deployments=[deployment])
    ready = {"model": "second", "state": "NODE_STATE_READY"}.items()
    other.until(
        lambda line: line["event"] == "beat" and any(ready <= each.items() for each in line["message"].get("models", ()))
    )
    assert other.event("beat")["message"]["unknown"] == []
