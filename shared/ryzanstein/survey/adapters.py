"""What adapters should be registered, as the orchestrator has it, and what the nodes say of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cluster import Node
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import answered
from ryzanstein.survey.reach import ORCHESTRATOR
from ryzanstein.v1 import adapter_pb2, adapter_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from ryzanstein.wire.adapters import deployed_adapter_from_wire, deployed_adapter_to_wire
from ryzanstein.wire.membership import node_from_wire

TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 2.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class AdapterOnNode:
    """The newest revision of an adapter on one node; 0: it has none. `refusal` says why that one is not registered."""

    node_id: str
    revision: int = 0
    digest: str = ""
    resident: bool = False
    num_bytes: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter that should be registered, and the nodes that have its model."""

    adapter: DeployedAdapter
    nodes: tuple[AdapterOnNode, ...]

    @property
    def ready(self) -> tuple[AdapterOnNode, ...]:
        """The nodes that have this revision."""
        return tuple(node for node in self.nodes if node.revision == self.adapter.revision and not node.refusal)

    @property
    def refused(self) -> tuple[AdapterOnNode, ...]:
        """The nodes that cannot have this revision, or do not say."""
        return tuple(node for node in self.nodes if node.revision in (0, self.adapter.revision) and node.refusal)

    @property
    def settled(self) -> bool:
        """Whether there are nodes, and each has it or cannot have it."""
        return bool(self.nodes) and len(self.ready) + len(self.refused) == len(self.nodes)


class AdapterClient:
    """Calls an orchestrator, and nodes, about adapters. All methods raise RyzansteinError."""

    def __init__(self, address: str, dialer: Dialer = PLAIN) -> None:
        self._dialer = dialer
        self._channel = dialer.open(address, ORCHESTRATOR)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def __aenter__(self) -> AdapterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def deploy(self, adapter: DeployedAdapter) -> DeployedAdapter:
        """Returns the adapter as it is stored, with its revision."""
        request = orchestrator_pb2.DeployAdapterRequest(adapter=deployed_adapter_to_wire(adapter))
        return deployed_adapter_from_wire((await answered(self._stub.DeployAdapter(request, timeout=TIMEOUT_S))).adapter)

    async def remove(self, name: str) -> None:
        """Raises NOT_FOUND if there is none."""
        await answered(self._stub.RemoveAdapter(orchestrator_pb2.RemoveAdapterRequest(name=name), timeout=TIMEOUT_S))

    async def all(self) -> list[DeployedAdapter]:
        """Returns all adapters, by name."""
        request = orchestrator_pb2.ListDeployedAdaptersRequest()
        listed = await answered(self._stub.ListDeployedAdapters(request, timeout=TIMEOUT_S))
        return [deployed_adapter_from_wire(each) for each in listed.adapters]

    async def find(self, name: str) -> DeployedAdapter | None:
        return next((each for each in await self.all() if each.name == name), None)

    async def settle(self, adapter: DeployedAdapter, wait_s: float) -> AdapterView:
        """Returns how the nodes have it when all have taken or refused it, or the time is over."""
        ends_s = time.monotonic() + wait_s
        while True:
            (view,) = await self.look([adapter])
            if view.settled or time.monotonic() > ends_s:
                return view
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self, adapters: Sequence[DeployedAdapter]) -> list[AdapterView]:
        """Returns what the nodes of each adapter's model say of it."""
        members = await answered(self._stub.ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=TIMEOUT_S))
        nodes = [node_from_wire(node) for node in members.nodes]
        asked = [(node, model) for node in nodes for model in _models(node) & {each.model for each in adapters}]
        answers = await asyncio.gather(*(self._ask(node, model) for node, model in asked))
        return [
            AdapterView(
                adapter,
                tuple(
                    found.get(adapter.name, AdapterOnNode(node.node_id, refusal=found[""].refusal if "" in found else ""))
                    for (node, model), found in zip(asked, answers, strict=True)
                    if model == adapter.model
                ),
            )
            for adapter in adapters
        ]

    async def _ask(self, node: Node, model: str) -> dict[str, AdapterOnNode]:
        """Returns a node's adapters by name; under the empty name why it does not say."""
        address = node.address_with(tls=self._dialer.secure) or node.address
        async with self._dialer.open(address, Peer(PeerRole.NODE, node.node_id)) as channel:
            stub = adapter_pb2_grpc.AdapterServiceStub(channel)
            try:
                answer = await answered(stub.ListAdapters(adapter_pb2.ListAdaptersRequest(model=model), timeout=NODE_TIMEOUT_S))
            except RyzansteinError as error:
                too_old = error.code is Code.UNIMPLEMENTED
                return {
                    "": AdapterOnNode(node.node_id, refusal="the node is of an older version" if too_old else error.message)
                }
        return {each.adapter.adapter.name: _view(node.node_id, each) for each in answer.adapters}


def _models(node: Node) -> set[str]:
    return {report.model for report in node.models} | ({node.model} if node.model else set())


def _view(node_id: str, status: adapter_pb2.AdapterStatus) -> AdapterOnNode:
    adapter = status.adapter
    digest = adapter.adapter.digest.hex()
    return AdapterOnNode(node_id, adapter.revision, digest, adapter.resident, status.bytes, status.refusal)
