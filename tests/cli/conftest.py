"""An orchestrator and nodes that say what a test tells them to, each on a port of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cluster import Beat, Deployment, Node
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc, worker_pb2, worker_pb2_grpc
from ryzanstein.wire.membership import beat_to_wire, deployment_from_wire, deployment_to_wire, node_to_wire


class ScriptedNode(worker_pb2_grpc.WorkerServiceServicer):
    """Answers GetStatus with the beat of each model; the first one stands for names that it lacks."""

    def __init__(self, node_id: str, *beats: Beat) -> None:
        self._node_id, self._beats = node_id, beats

    def GetStatus(self, request: worker_pb2.GetStatusRequest, context: Any) -> worker_pb2.GetStatusResponse:
        beat = next((beat for beat in self._beats[1:] if beat.model == request.model), self._beats[0])
        node_id = self._node_id if beat is self._beats[0] else f"{self._node_id}/{beat.model}"
        return worker_pb2.GetStatusResponse(node_id=node_id, beat=beat_to_wire(beat))


@dataclass
class ScriptedOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Lists `nodes`, and each deployment with its `status`; stores deployments with `revision`, if that is given.

    `drained` are the nodes that were drained and undrained, with which of both.
    """

    address: str
    servers: list[grpc.Server]
    nodes: list[Node] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    revision: int = 0
    earlier_path: str = ""
    knows_bounds: bool = True
    deployed: list[tuple[Deployment, bool]] = field(default_factory=list)
    drained: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, node: Node, *beats: Beat) -> Node:
        """Adds a member. It answers at its address if it has beats."""
        if beats:
            server = grpc.server(ThreadPoolExecutor(2))
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedNode(node.node_id, *beats), server)
            node = replace(node, address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            self.servers.append(server)
        else:
            node = replace(node, address=f"127.0.0.1:{free_ports(1)[0]}")
        self.nodes.append(node)
        return node

    def ListNodes(self, request: Any, context: Any) -> orchestrator_pb2.ListNodesResponse:
        return orchestrator_pb2.ListNodesResponse(nodes=map(node_to_wire, self.nodes))

    def DrainNode(self, request: orchestrator_pb2.DrainNodeRequest, context: Any) -> orchestrator_pb2.DrainNodeResponse:
        self.drained.append((request.node_id, True))
        return orchestrator_pb2.DrainNodeResponse()

    def UndrainNode(self, request: orchestrator_pb2.UndrainNodeRequest, context: Any) -> orchestrator_pb2.UndrainNodeResponse:
        if request.node_id not in [node.node_id for node in self.nodes]:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.node_id}")
        self.drained.append((request.node_id, False))
        return orchestrator_pb2.UndrainNodeResponse()

    def DeployModel(self, request: orchestrator_pb2.DeployModelRequest, context: Any) -> orchestrator_pb2.DeployModelResponse:
        deployment = deployment_from_wire(request.deployment)
        deployment = replace(deployment, revision=self.revision)
        if request.rollback:
            deployment = replace(deployment, path=self.earlier_path)
        elif self.revision:
            deployment = replace(deployment, earlier_path=self.earlier_path)
        if not self.knows_bounds:
            deployment = Deployment(deployment.model, deployment.path, deployment.replicas, deployment.revision)
        if not self.revision:  # an older one, which does not know the other field either
            deployment = replace(deployment, idle_unload_s=0.0)
        self.deployed.append((deployment, request.reload))
        return orchestrator_pb2.DeployModelResponse(deployment=deployment_to_wire(deployment))

    def ListDeployments(self, request: Any, context: Any) -> orchestrator_pb2.ListDeploymentsResponse:
        statuses = [
            orchestrator_pb2.DeploymentStatus(deployment=deployment_to_wire(deployment), **self.status)
            for deployment, _ in self.deployed[-1:]
        ]
        return orchestrator_pb2.ListDeploymentsResponse(deployments=statuses)


@pytest.fixture
def orchestrator() -> Iterator[ScriptedOrchestrator]:
    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_insecure_port("127.0.0.1:0")
    made = ScriptedOrchestrator(f"127.0.0.1:{port}", [server])
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(made, server)
    server.start()
    yield made
    for each in made.servers:
        each.stop(None)
