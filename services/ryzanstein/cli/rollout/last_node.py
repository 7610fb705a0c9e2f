"""Whether a node to be drained is the last one that takes work, according to the orchestrator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ryzanstein.cli.rollout.ready_models import ready_models
from ryzanstein.cluster import Node
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ANY_NODE, ORCHESTRATOR
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc, worker_pb2, worker_pb2_grpc
from ryzanstein.wire.membership import node_from_wire

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class LastNode:
    """A node without which nothing serves `models`."""

    node_id: str
    models: tuple[str, ...]

    def __str__(self) -> str:
        visible = " and ".join(filter(None, (", ".join(map(repr, self.models[:-1])), repr(self.models[-1]))))
        which = "this model" if len(self.models) == 1 else "these models"
        return f"{self.node_id} is the last ready node of {visible}: after it drains, every request for {which} fails"


async def last_node(orchestrator: str, node_id: str, dialer: Dialer = PLAIN) -> LastNode | None:
    """Returns None if others serve all its models, it serves none, or it is no known member.

    Raises RyzansteinError.
    """
    return last_of(await members(orchestrator, dialer), node_id)


def last_of(nodes: Iterable[Node], node_id: str) -> LastNode | None:
    """Returns the same as `last_node`, of members that are known already."""
    ready = {node.node_id: ready_models(node) for node in nodes}
    own = ready.pop(node_id, set())
    alone = sorted(own.difference(*ready.values()))
    return LastNode(node_id, tuple(alone)) if alone else None


async def last_node_at(orchestrator: str, address: str, dialer: Dialer = PLAIN) -> LastNode | None:
    """Returns the same as `last_node`, for the node at an address.

    Also returns None when the node or the orchestrator does not answer: a caller that contacts a
    node directly may have no orchestrator.
    """
    try:
        async with dialer.open(address, ANY_NODE) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            status = await answered(stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_TIMEOUT_S))
        return await last_node(orchestrator, status.node_id, dialer)
    except RyzansteinError:
        return None


async def members(orchestrator: str, dialer: Dialer) -> list[Node]:
    """Returns the nodes that the orchestrator knows. Raises RyzansteinError."""
    async with dialer.open(orchestrator, ORCHESTRATOR) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        answer = await answered(stub.ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=_TIMEOUT_S))
    return [node_from_wire(node) for node in answer.nodes]
