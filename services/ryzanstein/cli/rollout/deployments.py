"""What should run and where, as the orchestrator reports it, and the table of `ryzanstein deploy --list`."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.fitted_table import Column, FittedTable
from ryzanstein.cluster import Deployment, Node
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ORCHESTRATOR
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc, worker_pb2, worker_pb2_grpc
from ryzanstein.wire.membership import deployment_from_wire, deployment_to_wire, node_from_wire

TIMEOUT_S = 10.0
DEPLOY_TIMEOUT_S = 60.0  # nodes measure a directory before the answer
NODE_TIMEOUT_S = 2.0
EVERY_NODE = "every"
_LISTED_NODES = 8


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a node cannot take a deployment. `missing_bytes`: the memory it lacks; 0: another reason."""

    node_id: str
    missing_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment, the nodes that are chosen for it, and the nodes that report it as ready.

    `outdated` nodes still serve an earlier revision, and `waits_for` is why no further one changes, `halted` until it is
    deployed again. `shortages` are why nodes cannot take it.
    """

    deployment: Deployment
    assigned: tuple[str, ...]
    ready: tuple[str, ...]
    outdated: tuple[str, ...] = ()
    shortages: tuple[Shortage, ...] = ()
    waits_for: str = ""
    halted: bool = False


@dataclass(frozen=True, slots=True)
class Assignments:
    """All deployments and members at one moment, both by name."""

    deployments: Mapping[str, DeploymentView]
    nodes: Mapping[str, Node]


class DeploymentClient:
    """Calls an orchestrator about deployments. All methods raise RyzansteinError."""

    def __init__(self, address: str, dialer: Dialer = PLAIN) -> None:
        self._channel = dialer.open(address, ORCHESTRATOR)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def __aenter__(self) -> DeploymentClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def deploy(self, deployment: Deployment, *, reload: bool = False, rollback: bool = False) -> Deployment:
        """Returns the deployment as it is stored, with its revision. An older orchestrator gives it none."""
        request = orchestrator_pb2.DeployModelRequest(
            deployment=deployment_to_wire(deployment),
            reload=reload,
            rollback=rollback,
            allow_outage=deployment.rollout.allow_outage,  # an older orchestrator does not know rollout
            idempotency_key=uuid.uuid4().hex,  # the channel may repeat the request at another leader
        )
        answer = await answered(self._stub.DeployModel(request, timeout=DEPLOY_TIMEOUT_S))
        return deployment_from_wire(answer.deployment)

    async def remove(self, model: str) -> None:
        """Raises NOT_FOUND if the model is not deployed."""
        await answered(self._stub.RemoveModel(orchestrator_pb2.RemoveModelRequest(model=model), timeout=TIMEOUT_S))

    async def look(self) -> Assignments:
        """Returns what is deployed, and the members.

        Deployments first: the orchestrator then has computed where they go, so that any later beat
        of a node is answered accordingly.
        """
        listed = await answered(self._stub.ListDeployments(orchestrator_pb2.ListDeploymentsRequest(), timeout=TIMEOUT_S))
        members = await answered(self._stub.ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=TIMEOUT_S))
        return Assignments(
            {status.deployment.model: _view(status) for status in listed.deployments},
            {node.node_id: node_from_wire(node) for node in members.nodes},
        )


def _view(status: orchestrator_pb2.DeploymentStatus) -> DeploymentView:
    return DeploymentView(
        deployment_from_wire(status.deployment),
        tuple(status.assigned_nodes),
        tuple(status.ready_nodes),
        tuple(status.outdated_nodes),
        tuple(Shortage(each.node_id, each.missing_bytes, each.reason) for each in status.shortages),
        status.waits_for,
        status.halted,
    )


async def reason_of(node: Node, dialer: Dialer = PLAIN) -> str:
    """Returns why an older node is not ready, in its own words. The orchestrator does not know it."""
    async with dialer.open(node.address_with(tls=dialer.secure) or node.address, Peer(PeerRole.NODE, node.node_id)) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await answered(stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=NODE_TIMEOUT_S))
        except RyzansteinError as error:
            return f"it does not say why ({error.code.name})"
    failed = answer.beat.state == worker_pb2.NODE_STATE_FAILED
    return answer.beat.reason if failed and answer.beat.reason else "it does not say why"


def deployment_table(views: Iterable[DeploymentView]) -> FittedTable:
    table = FittedTable(
        "deployments",
        Column("model", folds=True),
        Column("path", 2, folds=True),
        Column("wanted"),
        Column("assigned nodes", 1, folds=True),
        Column("ready nodes", folds=True),
        Column("outdated nodes", 3, folds=True),
        Column("these wait for", 4, folds=True),
    )
    for view in views:
        nodes = map(names, (view.assigned, view.ready, view.outdated))
        waits_for = f"halted: {view.waits_for}" if view.halted else view.waits_for or "-"
        table.add(view.deployment.model, view.deployment.path, _wanted(view.deployment), *nodes, waits_for)
    return table


def _wanted(deployment: Deployment) -> str:
    bounds = {"min": deployment.min_replicas, "max": deployment.max_replicas}
    listed = ", ".join(f"{name} {bound}" for name, bound in bounds.items() if bound)
    return f"{deployment.replicas or EVERY_NODE}{listed and f' ({listed})'}"


def as_document(views: Iterable[DeploymentView]) -> dict[str, Any]:
    """Returns the deployments for scripts. `wanted` is null for every node, what `rollout` does not state is null."""
    return {
        "deployments": [
            {
                "model": view.deployment.model,
                "path": view.deployment.path,
                "revision": view.deployment.revision,
                "wanted": view.deployment.replicas or None,
                "idle_unload_s": view.deployment.idle_unload_s,
                "min_nodes": view.deployment.min_replicas,
                "max_nodes": view.deployment.max_replicas or None,
                "rollout": asdict(view.deployment.rollout),
                "earlier_path": view.deployment.earlier_path,
                "assigned_nodes": list(view.assigned),
                "ready_nodes": list(view.ready),
                "outdated_nodes": list(view.outdated),
                "waits_for": view.waits_for,
                "halted": view.halted,
                "shortages": [asdict(each) for each in view.shortages],
            }
            for view in views
        ]
    }


def names(node_ids: Iterable[str]) -> str:
    """Returns node ids for people: the first ones, and how many more there are."""
    given = list(node_ids)
    more = f" and {len(given) - _LISTED_NODES} more" if len(given) > _LISTED_NODES else ""
    return (", ".join(given[:_LISTED_NODES]) or "-") + more
