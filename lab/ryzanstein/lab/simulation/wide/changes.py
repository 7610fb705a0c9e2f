"""What happens to many nodes at once, and to what all of them depend on: the faults of wide plans."""

from __future__ import annotations

import asyncio
from typing import Any

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.simulation.cluster import Cluster, Service
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL, Kind, PlannedFault
from ryzanstein.lab.simulation.wide.checks import WideChecks
from ryzanstein.rpc.client import PLAIN
from ryzanstein.rpc.status import answered
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_KILLED, _LEAVING = 0.02, 0.1
_SIGTERM = 15
_TIMEOUT_S = 10.0
# Until all routers see what is there again. A restarted orchestrator has ten seconds, as it waits for its members; what was cut
# off has a lease of three seconds, and a node's longest pause before it registers again.
_AGAIN_S = {Kind.KILL_ORCHESTRATOR: 10.0, Kind.PART_HALF: 15.0, Kind.LEAVE_MANY: 15.0}
_OTHERS_S = 10.0
_GONE_S = 5.0


class WideChanges:
    """Carries out the changes of a plan, each with how soon routers must agree again. `run` it in its own process."""

    def __init__(self, cluster: Cluster, checks: WideChecks) -> None:
        self._cluster, self._checks = cluster, checks

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._cluster.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            self._cluster.record.say("STRIKE", kind=fault.kind.value, number=fault.number, target=fault.target)
            self._checks.reach(f"fault {fault.kind.value}")
            await getattr(self, f"_{fault.kind.value}")(fault)
            self._cluster.record.say("MENDED", kind=fault.kind.value, number=fault.number)

    def _some(self, fault: PlannedFault, share: float) -> list[Service]:
        nodes, rng = self._cluster.nodes, self._cluster.rng(f"some {fault.number}")
        return rng.sample(nodes, max(1, round(share * len(nodes))))

    def _ended(self, fault: PlannedFault) -> None:
        self._checks.disturbed(fault.kind.value, _AGAIN_S.get(fault.kind, _OTHERS_S))

    async def _kill_many(self, fault: PlannedFault) -> None:
        """Kills nodes; their supervisors restart them."""
        for node in self._some(fault, _KILLED):
            assert node.process is not None
            node.process.kill()
        self._ended(fault)

    async def _leave_many(self, fault: PlannedFault) -> None:
        """Stops a tenth of the nodes at once, and starts them again later."""
        leaving = self._some(fault, _LEAVING)
        self._checks.disturbed("nodes that left", 2 * _GONE_S)  # the grace for what runs, and then they leave
        for node in leaving:
            node.wanted = False
            assert node.process is not None
            node.process.signal(_SIGTERM)
        await asyncio.sleep(fault.lasts_s)
        for node in leaving:
            node.wanted = True
            node.start()
        self._ended(fault)

    async def _part_half(self, fault: PlannedFault) -> None:
        """Cuts half of the nodes off from the orchestrator. Routers still reach them."""
        name = self._cluster.orchestrator.name
        parted = self._some(fault, 0.5)
        pairs = [pair for node in parted for pair in ((node.name, name), (name, node.name))]
        self._checks.disturbed("nodes that are parted", _GONE_S)
        for pair in pairs:
            self._cluster.network.cut(*pair)
        self._checks.parted = frozenset(node.name for node in parted)
        await asyncio.sleep(fault.lasts_s)
        self._checks.parted = frozenset()
        self._cluster.network.heal(*pairs)
        self._ended(fault)

    async def _kill_router(self, fault: PlannedFault) -> None:
        process = self._cluster.routers[fault.target].process
        assert process is not None
        process.kill()
        self._ended(fault)

    async def _kill_orchestrator(self, fault: PlannedFault) -> None:
        process = self._cluster.orchestrator.process
        assert process is not None
        process.kill()
        self._ended(fault)

    async def _drain_node(self, fault: PlannedFault) -> None:
        name = self._cluster.nodes[fault.target].name
        await self._ask("DrainNode", pb.DrainNodeRequest(node_id=name))
        await asyncio.sleep(fault.lasts_s)
        await self._ask("UndrainNode", pb.UndrainNodeRequest(node_id=name))

    async def _change_model(self, fault: PlannedFault) -> None:
        """Deploys the model as it is, and then anew: nodes change one wave after the other. Does not wait for the last one."""
        deployment = pb.Deployment(model=FIRST_MODEL, path=str(MODEL_DIR), replicas=0)
        await self._ask("DeployModel", pb.DeployModelRequest(deployment=deployment))
        answer = await self._ask("DeployModel", pb.DeployModelRequest(deployment=deployment, reload=True))
        if answer is not None:
            self._checks.wanted_revision = answer.deployment.revision

    async def _ask(self, method: str, request: Any) -> Any:
        """Sends a request as an operator does, who asks again until it is answered. None: it was refused."""
        while True:
            async with PLAIN.open(self._cluster.orchestrator.address, Peer(PeerRole.ORCHESTRATOR)) as channel:
                try:
                    return await answered(getattr(OrchestratorServiceStub(channel), method)(request, timeout=_TIMEOUT_S))
                except RyzansteinError as error:
                    self._cluster.record.say("OPERATOR refused", method=method, reason=error.reason, message=error.message)
            await asyncio.sleep(1.0)
