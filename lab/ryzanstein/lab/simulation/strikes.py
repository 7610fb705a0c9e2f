"""Faults as they strike a simulated cluster. Each records which services may be blamed for it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.simulation import services
from ryzanstein.lab.simulation.checks import Checks
from ryzanstein.lab.simulation.cluster import ORCHESTRATOR, Cluster, Service
from ryzanstein.lab.simulation.leaders.strikes import LeaderStrikes
from ryzanstein.lab.simulation.machine.process import DISK_S
from ryzanstein.lab.simulation.planning.plan import LEADER_FAULTS, PlannedFault
from ryzanstein.lab.simulation.ranks.ranks import SimulatedRanks
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

STORE = "store"
JOURNAL = "journal"
# A state of a later version of the protocol.
NEWER_STATE = 17
SLOW_DISK_S = 0.8
SLOW_BY = (2.0, 5.0, 10.0, 20.0)


class FaultInjector:
    """The faults of one plan. `run` it in its own process of the simulator.

    It starts each fault at its time and ends it after its duration.
    """

    def __init__(self, cluster: Cluster, checks: Checks) -> None:
        self._cluster, self._checks = cluster, checks
        self._leaders = LeaderStrikes(cluster)
        self._mending: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for fault in self._cluster.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - loop.time()))
            self._mending.append(loop.create_task(self._strike(fault)))
        await asyncio.gather(*self._mending)

    async def _strike(self, fault: PlannedFault) -> None:
        self._cluster.record.say("STRIKE", kind=fault.kind.value, number=fault.number, target=fault.target, rank=fault.rank)
        self._checks.reach(f"fault {fault.kind.value}")
        if fault.kind in LEADER_FAULTS:
            await getattr(self._leaders, fault.kind.value)(fault)
        else:
            await getattr(self, f"_{fault.kind.value}")(fault)
        self._cluster.record.say("MENDED", kind=fault.kind.value, number=fault.number)

    def _node(self, fault: PlannedFault) -> Service:
        return self._cluster.nodes[fault.target % len(self._cluster.nodes)]

    def _router(self, fault: PlannedFault) -> Service:
        return self._cluster.routers[fault.target % len(self._cluster.routers)]

    def _model(self, fault: PlannedFault) -> str:
        """Returns the model of the struck node whose ranks are meant."""
        models = self._cluster.plan.models_of(fault.target % len(self._cluster.nodes))
        return models[fault.model % len(models)]

    def _ranks(self, fault: PlannedFault) -> SimulatedRanks:
        return self._cluster.ranks[fault.target % len(self._cluster.nodes)].of(self._model(fault))

    def _ranks_everywhere(self, fault: PlannedFault) -> Iterator[tuple[Service, SimulatedRanks]]:
        """Yields each node that serves the meant model, with its ranks."""
        models = self._cluster.plan.models
        model = models[fault.model % len(models)]
        for number, (service, ranks) in enumerate(zip(self._cluster.nodes, self._cluster.ranks, strict=True)):
            if model in self._cluster.plan.models_of(number):
                self._checks.struck_model(service.name, model, fault.lasts_s)
                yield service, ranks.of(model)

    def _rank(self, fault: PlannedFault) -> int:
        return fault.rank % self._cluster.plan.nodes[fault.target % len(self._cluster.nodes)].tp

    def _held_against(self, fault: PlannedFault, *services: Service) -> None:
        for service in services:
            self._checks.struck(service.name, fault.lasts_s)

    def _ranks_held_against(self, fault: PlannedFault) -> None:
        self._checks.struck_model(self._node(fault).name, self._model(fault), fault.lasts_s)

    # Processes.

    async def _kill(self, service: Service) -> None:
        """Kills a service; its supervisor restarts it."""
        if service.process is not None:
            service.process.kill()

    async def _freeze(self, fault: PlannedFault, *services: Service) -> None:
        self._held_against(fault, *services)
        processes = [service.process for service in services if service.process is not None]
        for process in processes:
            process.freeze()
        await asyncio.sleep(fault.lasts_s)
        for process in processes:
            process.thaw()

    async def _kill_node(self, fault: PlannedFault) -> None:
        self._held_against(fault, self._node(fault))
        await self._kill(self._node(fault))

    async def _freeze_node(self, fault: PlannedFault) -> None:
        await self._freeze(fault, self._node(fault))

    async def _freeze_all_nodes(self, fault: PlannedFault) -> None:
        await self._freeze(fault, *self._cluster.nodes)

    async def _kill_router(self, fault: PlannedFault) -> None:
        await self._kill(self._router(fault))

    async def _restart_router(self, fault: PlannedFault) -> None:
        if (process := self._router(fault).process) is not None:
            process.signal(15)

    async def _freeze_router(self, fault: PlannedFault) -> None:
        await self._freeze_unblamed(fault, self._router(fault))

    async def _hold_router(self, fault: PlannedFault) -> None:
        """Blocks its loop for less time than a freeze; no other service needs to notice."""
        await self._freeze_unblamed(fault, self._router(fault))

    async def _freeze_unblamed(self, fault: PlannedFault, service: Service) -> None:
        if (process := service.process) is not None:
            self._checks.struck(service.name, fault.lasts_s)
            self._checks.struck(JOURNAL, fault.lasts_s)  # after it, the router finds its journal requests timed out
            process.freeze()
            await asyncio.sleep(fault.lasts_s)
            process.thaw()

    async def _kill_orchestrator(self, fault: PlannedFault) -> None:
        await self._kill(self._cluster.orchestrator)

    async def _freeze_orchestrator(self, fault: PlannedFault) -> None:
        await self._freeze(fault, self._cluster.orchestrator)

    # Ranks.

    async def _kill_rank(self, fault: PlannedFault) -> None:
        self._ranks_held_against(fault)
        self._ranks(fault).kill(self._rank(fault))

    async def _kill_a_rank_of_each_node(self, fault: PlannedFault) -> None:
        for service, ranks in self._ranks_everywhere(fault):
            ranks.kill(fault.rank % self._tp(service))

    async def _stop_rank(self, fault: PlannedFault) -> None:
        self._ranks_held_against(fault)
        ranks, rank = self._ranks(fault), self._rank(fault)
        ranks.stop(rank)
        await asyncio.sleep(fault.lasts_s)
        ranks.resume(rank)

    async def _crash_rank(self, fault: PlannedFault) -> None:
        self._ranks_held_against(fault)
        self._ranks(fault).crash(self._rank(fault), "a fault of the simulator")

    async def _hang_rank(self, fault: PlannedFault) -> None:
        self._ranks_held_against(fault)
        self._ranks(fault).hang(self._rank(fault))

    async def _slow_rank(self, fault: PlannedFault) -> None:
        self._ranks_held_against(fault)
        ranks, rank = self._ranks(fault), self._rank(fault)
        ranks.slow(rank, 20.0)
        await asyncio.sleep(fault.lasts_s)
        ranks.slow(rank, 1.0)

    async def _slow_node(self, fault: PlannedFault) -> None:
        """Slows all steps of a node, as a busy machine does. Whatever waits for it goes on, there or at a faster node."""
        if SLOW_BY[fault.rank] > 5.0:
            self._ranks_held_against(fault)
        ranks = self._ranks(fault)
        for rank in range(4):
            ranks.slow(rank, SLOW_BY[fault.rank])
        await asyncio.sleep(fault.lasts_s)
        for rank in range(4):
            ranks.slow(rank, 1.0)

    async def _crash_model(self, fault: PlannedFault) -> None:
        """Makes all ranks of one model on a node report a crash and end."""
        self._ranks_held_against(fault)
        for rank in range(self._tp(self._node(fault))):
            self._ranks(fault).crash(rank, "a fault of the simulator")

    async def _kill_model_everywhere(self, fault: PlannedFault) -> None:
        for service, ranks in self._ranks_everywhere(fault):
            for rank in range(self._tp(service)):
                ranks.kill(rank)

    async def _out_of_memory(self, fault: PlannedFault) -> None:
        """Makes a few steps run out of memory, which the engine survives."""
        self._ranks_held_against(fault)
        self._ranks(fault).out_of_memory(1 + fault.rank)

    def _tp(self, service: Service) -> int:
        return self._cluster.plan.nodes[self._cluster.nodes.index(service)].tp

    async def _hiccup(self, fault: PlannedFault) -> None:
        """Slows a rank for a moment: this is no fault, and nothing should act on it."""
        ranks, rank = self._ranks(fault), self._rank(fault)
        ranks.slow(rank, 8.0)
        await asyncio.sleep(fault.lasts_s)
        ranks.slow(rank, 1.0)

    # What operators and other versions do.

    async def _drain_node(self, fault: PlannedFault) -> None:
        node = self._node(fault)
        self._held_against(fault, node)
        await self._ask_orchestrator("DrainNode", orchestrator.DrainNodeRequest(node_id=node.name))
        await asyncio.sleep(fault.lasts_s)
        await self._ask_orchestrator("UndrainNode", orchestrator.UndrainNodeRequest(node_id=node.name))

    async def _ask_orchestrator(self, method: str, request: Any) -> None:
        """Sends a request as an operator does, who retries until it succeeds."""
        for _ in range(60):
            async with open_channel(self._cluster.orchestrator.address) as channel:
                try:
                    await getattr(OrchestratorServiceStub(channel), method)(request, timeout=5.0)
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(1.0)

    async def _newer_node(self, fault: PlannedFault) -> None:
        """Makes a node report, for a while, a state that this version does not know."""
        node = self._node(fault)
        self._held_against(fault, node)
        if (process := node.process) is not None:
            process.rewrite = _in_newer_state
            await asyncio.sleep(fault.lasts_s)
            process.rewrite = None

    async def _load_cancelled(self, fault: PlannedFault) -> None:
        """Loads the model again as an operator who does not wait for it."""
        node = self._node(fault)
        self._ranks_held_against(fault)
        async with open_channel(node.address, retries=False) as channel:
            request = worker.LoadModelRequest(model=self._model(fault), path=str(MODEL_DIR))
            try:
                await WorkerServiceStub(channel).LoadModel(request, timeout=0.0004 + fault.lasts_s / 1000)
            except grpc.aio.AioRpcError as failure:
                self._cluster.record.say("load", code=failure.code().name, details=failure.details())

    async def _replace_key(self, fault: PlannedFault) -> None:
        """Replaces the key of a client while it asks."""
        plan = self._cluster.plan
        await self._cluster.keys.replace(plan.clients[fault.target % len(plan.clients)].number)

    async def _limits_away(self, fault: PlannedFault) -> None:
        """Takes the server of the limits away: it refuses, or does not answer."""
        (server,) = services.LIMITS
        server.is_away, server.hangs = True, bool(fault.rank)
        await asyncio.sleep(fault.lasts_s)
        server.is_away = False

    # The network.

    async def _cut_one_way(self, fault: PlannedFault) -> None:
        node = self._node(fault)
        pair = (node.name, fault.toward) if fault.rank % 2 else (fault.toward, node.name)
        await self._cut(fault, [pair])

    async def _cut_both_ways(self, fault: PlannedFault) -> None:
        node = self._node(fault)
        await self._cut(fault, [(node.name, fault.toward), (fault.toward, node.name)])

    async def _cut(self, fault: PlannedFault, pairs: Sequence[tuple[str, str]]) -> None:
        if fault.toward != ORCHESTRATOR:
            self._held_against(fault, self._node(fault))
        for pair in pairs:
            self._cluster.network.cut(*pair)
        await asyncio.sleep(fault.lasts_s)
        self._cluster.network.heal(*pairs)

    async def _reset(self, fault: PlannedFault) -> None:
        """Resets every connection between a node and another service."""
        node = self._node(fault)
        self._held_against(fault, node)
        for connection in self._cluster.network.connections:
            if {connection.client.machine.name, connection.server.machine.name} == {node.name, fault.toward}:
                self._cluster.network.reset(connection)

    async def _latency(self, fault: PlannedFault) -> None:
        weather = self._cluster.network.weather
        weather.spike_share, weather.spike_s = 0.01, 0.05
        await asyncio.sleep(fault.lasts_s)
        weather.spike_share = 0.0

    # Machines.

    async def _clock_jump(self, fault: PlannedFault) -> None:
        for service in (self._node(fault), self._router(fault)):
            service.machine.wall_offset_s += fault.lasts_s

    async def _store_fails(self, fault: PlannedFault) -> None:
        await self._disk(fault, lambda: sqlite3.OperationalError("disk I/O error"))

    async def _store_full(self, fault: PlannedFault) -> None:
        await self._disk(fault, lambda: sqlite3.OperationalError("database or disk is full"))

    async def _store_odd(self, fault: PlannedFault) -> None:
        """Makes the store raise an unexpected exception.

        Requests that need the store fail with INTERNAL.
        """
        self._checks.struck(STORE, fault.lasts_s)
        await self._disk(fault, lambda: ValueError("unexpected: the store's library has a bug"))

    async def _disk(self, fault: PlannedFault, make: Callable[[], Exception]) -> None:
        self._checks.struck(JOURNAL, fault.lasts_s)
        machine = self._router(fault).machine
        machine.disk_error = make
        await asyncio.sleep(fault.lasts_s)
        machine.disk_error = None

    async def _store_slow(self, fault: PlannedFault) -> None:
        self._checks.struck(JOURNAL, fault.lasts_s)
        machine = self._router(fault).machine
        machine.disk_delay_s = SLOW_DISK_S
        await asyncio.sleep(fault.lasts_s)
        machine.disk_delay_s = DISK_S


def _in_newer_state(message: Any) -> Any:
    """Returns the message as a newer node would send it."""
    if isinstance(message, worker.ConnectResponse):
        if message.HasField("beat"):
            message.beat.state = NEWER_STATE  # type: ignore[assignment]
        elif message.HasField("hello"):
            message.hello.beat.state = NEWER_STATE  # type: ignore[assignment]
    elif isinstance(message, orchestrator.HeartbeatRequest) and message.HasField("beat"):
        message.beat.state = NEWER_STATE  # type: ignore[assignment]
    elif isinstance(message, orchestrator.RegisterNodeRequest):
        message.node.state = NEWER_STATE  # type: ignore[assignment]
    return message
