"""The node as a member of its cluster: what it reports, and what it follows."""

from __future__ import annotations

from ryzanstein.cluster import Instruction, Node, NodeReport
from ryzanstein.worker.agent.membership.deployed import DeployedModels
from ryzanstein.worker.agent.membership.reachable_address import ReachableAddress
from ryzanstein.worker.agent.memory.node_memory import ModelMemory
from ryzanstein.worker.agent.models import NodeModels


class Member:
    """A `MembershipObserver`. `address` is that of the node's WorkerService."""

    def __init__(self, models: NodeModels, deployed: DeployedModels, memory: ModelMemory, address: ReachableAddress) -> None:
        self._models, self._deployed, self._memory = models, deployed, memory
        self._address = address

    async def locate(self) -> None:
        await self._address.look_up()

    def describe(self) -> Node:
        """Returns the node's description. State, load and context are those of the first model."""
        node = self._models.first.node
        beat = node.beat()
        return Node(
            node_id=node.settings.node_id,
            address=self._address.known,
            incarnation=node.incarnation,
            tp=node.settings.tp,
            state=beat.state,
            model=beat.model,
            context_length=beat.context_length,
            load=beat.load,
            models=self._deployed.reports(),
            memory_bytes=self._memory.total,
        )

    def report(self) -> NodeReport:
        needs = self._deployed.needs()
        return NodeReport(self._models.first.node.beat(), self._deployed.reports(), self._memory.total, needs)

    def follow(self, instruction: Instruction) -> None:
        self._deployed.follow(instruction)
