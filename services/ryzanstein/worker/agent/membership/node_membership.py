"""The node as a member of the cluster: registers, sends beats, follows the orchestrator, leaves.

The orchestrator may be away for any length of time: the node goes on serving and registers again
when the orchestrator is back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import structlog

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cluster import Instruction, Node, NodeReport
from ryzanstein.leaders.addresses import OrchestratorAddresses
from ryzanstein.leaders.epochs import StaleLeaderError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.status import leader_named_by
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from ryzanstein.wire.membership import heartbeat_to_wire, instruction_from_wire, leader_from_wire, node_to_wire
from ryzanstein.worker.agent.membership.deployed import DeployedModels
from ryzanstein.worker.agent.membership.deployed_adapters import AdapterFollower
from ryzanstein.worker.agent.membership.obedience import KeptLeader, LateAnswers
from ryzanstein.worker.agent.membership.reachable_address import ReachableAddress
from ryzanstein.worker.agent.memory.node_memory import ModelMemory
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics


class NodeMember:
    """A `MembershipObserver`. `address` is that of the node's WorkerService; `known` learns those of other nodes."""

    def __init__(
        self, models: NodeModels, deployed: DeployedModels, memory: ModelMemory, address: ReachableAddress, known: KnownNodes
    ) -> None:
        self._models, self._deployed, self._memory = models, deployed, memory
        self._address, self._known = address, known
        self._adapters = AdapterFollower(models)

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
            tls_address=self._address.with_tls,
            host=node.settings.node_host,
            zone=node.settings.node_zone,
        )

    def report(self) -> NodeReport:
        needs = self._deployed.needs()
        beat, digests = self._models.first.node.beat(), (self._known.digest, self._adapters.digest)
        return NodeReport(beat, self._deployed.reports(), self._memory.total, needs, *digests, self._deployed.starts(), True)

    def follow(self, instruction: Instruction) -> None:
        if instruction.members is not None:
            self._known.follow(instruction.members)
        self._deployed.follow(instruction)
        self._adapters.follow(instruction.adapters)

    async def wanted(self, timeout_s: float) -> None:
        await self._known.asked(timeout_s)


log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_LONGEST_OF_SEVERAL_S = 2.0
_REGISTER_OF_SEVERAL_S = 2.0


class MembershipObserver(Protocol):
    """The node as the cluster sees it. Called in the loop; must not block."""

    async def locate(self) -> None:
        """Finds the address that `describe` returns, which may take as long as name servers do."""
        ...

    def describe(self) -> Node: ...

    def report(self) -> NodeReport: ...

    def follow(self, instruction: Instruction) -> None:
        """Takes what the orchestrator wants of this node; repeated with every answer."""
        ...

    async def wanted(self, timeout_s: float) -> None:
        """Returns when the next beat is wanted: after this time, or sooner."""
        ...


class NodeMembership:
    """The node's membership in a cluster.

    Call `run` in a task that is restarted when it fails, and `leave` when the node is stopped.
    """

    def __init__(
        self,
        address: str,
        member: MembershipObserver,
        metrics: NodeMetrics,
        dialer: Dialer = PLAIN,
        leader: KeptLeader | None = None,
    ) -> None:
        """`address`: host:port of the orchestrator, or of several, with commas between them."""
        self._addresses = OrchestratorAddresses(address)
        self._dialer = dialer
        self._member = member
        self._metrics = metrics
        self._lease_id = ""
        self._registrations = 0
        self._leader = leader or KeptLeader()

    async def run(self) -> None:
        """Registers and sends beats until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            registered, why, leader = self._registrations, "", ""
            try:
                # A channel for each attempt: certificates may have changed.
                async with self._open() as channel:
                    await self._live(OrchestratorServiceStub(channel))
                cause = "ended"
            except grpc.aio.AioRpcError as error:
                cause, why, leader = error.code().name.lower(), str(error.details()), leader_named_by(error)
            except StaleLeaderError as stale:
                cause, why = "stale_leader", str(stale)
            except TimeoutError:
                cause = "silent"
            except asyncio.CancelledError:
                if _is_cancelled():
                    raise
                # Making a beat raised: gRPC then cancels its call without giving the reason.
                log.exception("beat failed")
                cause = "failed"
            backoff_s = _FIRST_BACKOFF_S if self._registrations > registered else backoff_s
            self._metrics.orchestrator_losses.labels(cause).inc()
            log.warning("orchestrator unavailable", address=self._addresses.current, cause=cause, why=why)
            if self._addresses.failed(leader, silent=cause in ("silent", "deadline_exceeded")):
                continue
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _LONGEST_OF_SEVERAL_S if self._addresses.several else _LONGEST_BACKOFF_S)

    async def _live(self, stub: Any) -> None:
        """Registers and sends beats until the stream of them ends."""
        interval_s = await self._register(stub)
        self._registrations += 1
        await self._beat(stub, interval_s)

    def _open(self) -> grpc.aio.Channel:
        return self._dialer.open(self._addresses.current, Peer(PeerRole.ORCHESTRATOR), retries=False)

    async def leave(self) -> None:
        """Leaves the cluster if the orchestrator answers; otherwise the lease expires."""
        if not self._lease_id:
            return
        request = orchestrator.LeaveNodeRequest(node_id=self._member.describe().node_id, lease_id=self._lease_id)
        async with self._open() as channel:
            try:
                await OrchestratorServiceStub(channel).LeaveNode(request, timeout=1.0)
            except grpc.aio.AioRpcError as error:
                log.warning("leave failed, lease will expire", cause=error.code().name)

    async def _register(self, stub: Any) -> float:
        """Registers the node; returns the seconds between beats."""
        await self._member.locate()
        await self._leader.load()
        known = self._leader.latest
        request = orchestrator.RegisterNodeRequest(
            node=node_to_wire(self._member.describe()), known_epoch=known.epoch, known_leader_id=known.leader_id
        )
        timeout_s = _REGISTER_OF_SEVERAL_S if self._addresses.several else CALL_TIMEOUT_S
        response = await stub.RegisterNode(request, timeout=timeout_s)
        await self._leader.follow(leader_from_wire(response))
        self._lease_id = response.lease_id
        self._addresses.answered()
        interval_s: float = response.heartbeat_interval.ToNanoseconds() / 1e9
        log.info("registered", address=self._addresses.current, heartbeat_interval_s=interval_s)
        return max(interval_s, 0.01)

    async def _beat(self, stub: Any, interval_s: float) -> None:
        """Sends beats until the stream ends.

        Raises TimeoutError when no answer came for several beats.
        """
        late = LateAnswers()
        call = stub.Heartbeat(self._beats(interval_s, late))
        answers = aiter(call)
        try:
            while True:
                async with asyncio.timeout(max(CALL_TIMEOUT_S, 3 * interval_s)):
                    answer = await anext(answers)
                await self._leader.follow(leader_from_wire(answer))
                if late.are_void(answer.sequence):
                    self._metrics.late_instructions.inc()
                else:
                    self._member.follow(instruction_from_wire(answer))
        except StopAsyncIteration:
            return
        finally:
            call.cancel()

    async def _beats(self, interval_s: float, late: LateAnswers) -> AsyncIterator[orchestrator.HeartbeatRequest]:
        node_id = self._member.describe().node_id
        while True:
            yield heartbeat_to_wire(node_id, self._lease_id, self._member.report(), late.sent())
            await self._member.wanted(interval_s)


def _is_cancelled() -> bool:
    """Returns whether this task itself is being cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
