"""One simulation, from the start of a plan until the cluster is at rest."""

from __future__ import annotations

import asyncio
import gc
import itertools
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ryzanstein.lab.simulation import rpc, services
from ryzanstein.lab.simulation.access.limits_server import LimitsServer
from ryzanstein.lab.simulation.checks import LOOK_S, BrokenPromise, Checks, Violation
from ryzanstein.lab.simulation.clients.asking import ClientTally
from ryzanstein.lab.simulation.clients.client import SimulatedClient
from ryzanstein.lab.simulation.cluster import Cluster
from ryzanstein.lab.simulation.leaders.leader_checks import LeaderChecks
from ryzanstein.lab.simulation.leaders.operator import Operator
from ryzanstein.lab.simulation.leaders.redis_server import SimulatedRedis
from ryzanstein.lab.simulation.machine import clock
from ryzanstein.lab.simulation.machine.loop import OWNER, DeadlockError, LivelockError, SimulatedLoop, run
from ryzanstein.lab.simulation.machine.network import SimulatedNetwork, Weather
from ryzanstein.lab.simulation.machine.process import Process, SimulatedMachine, State
from ryzanstein.lab.simulation.planning.plan import SimulationPlan
from ryzanstein.lab.simulation.record import SimulationRecord
from ryzanstein.lab.simulation.strikes import FaultInjector
from ryzanstein.lab.simulation.supervision import Restarts, UpsRestarts
from ryzanstein.lab.simulation.wide.changes import WideChanges
from ryzanstein.lab.simulation.wide.checks import WideChecks

# Clients may still be reading when the plan's duration is over.
_FINISH_S = 3600.0
_COLLECT_EVERY_S = 60.0
_COLLECT_ALL_EVERY = 10  # times: long-lived objects are many, and seldom garbage
_SHM = Path("/dev/shm")


@dataclass(slots=True)
class SimulationOutcome:
    """The result of a simulation. `digest` is the same for every run of the same plan."""

    plan: SimulationPlan
    violations: list[Violation]
    reached: dict[str, int]
    tally: ClientTally
    simulated_s: float
    processor_s: float
    callbacks: int
    digest: str
    record: SimulationRecord = field(repr=False)
    figures: dict[str, Any] = field(default_factory=dict)
    """What else was measured, in wide plans."""


def simulate(plan: SimulationPlan) -> SimulationOutcome:
    """Runs a plan. Call it only in a process where `clock.install` ran before everything else."""
    clock.seed(plan.seed)
    began = time.process_time()
    directory = Path(tempfile.mkdtemp(prefix="ryzanstein-", dir=_SHM if _SHM.is_dir() else None))
    loop = SimulatedLoop(clock.CLOCK)
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.unraisablehook = _unraisable
    # For coroutines of killed processes, and those that they were about to await.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    try:
        world = _World(plan, loop, directory)
        try:
            run(loop, world.live())
        except (DeadlockError, LivelockError) as error:  # raised by the loop, not by a task
            world.checks.violated(BrokenPromise.REST, str(error))
            world.end()
        return SimulationOutcome(
            plan,
            world.checks.violations,
            dict(world.checks.reached),
            world.tally,
            loop.time(),
            time.process_time() - began,
            loop.callbacks,
            world.record.digest,
            world.record,
            world.figures(),
        )
    finally:
        gc.enable()
        loop.close()
        shutil.rmtree(directory, ignore_errors=True)


class _World:
    """Everything that belongs to one simulation."""

    def __init__(self, plan: SimulationPlan, loop: SimulatedLoop, directory: Path) -> None:
        self.plan, self._loop = plan, loop
        self.record = SimulationRecord()
        self.record.install()
        self.tally = ClientTally()
        network = SimulatedNetwork(loop, _rng(plan, "network"), Weather(plan.latency_s, plan.latency_s))
        rpc.install(network)
        services.install()
        services.look_every(plan.wide.tick_s if plan.wide is not None else 0.2 if plan.seldom else None)
        services.LOST_TURNS.clear()
        services.LIMITS[:] = [LimitsServer()] if plan.limits is not None else []
        services.ON_DEPLOYED.clear()
        services.REDIS[:] = [] if plan.leaders is None else [SimulatedRedis(loop, network, _rng(plan, "redis"))]
        self._cluster = Cluster(plan, loop, network, self.record, directory)
        self._wide = None if plan.wide is None else WideChecks(self._cluster)
        self.checks = self._wide or Checks(self._cluster)
        self._operator = self._leaders = None
        if plan.leaders is not None:
            self._operator = Operator(self._cluster, _rng(plan, "operator"))
            self._leaders = LeaderChecks(self._cluster, self.checks, plan.leaders, self._operator)
        clock.CLOCK.wall_offset_s = _wall_offset_s
        loop.set_exception_handler(self._on_exception)

    async def live(self) -> None:
        """Runs until everything is at rest after the calm."""
        try:
            async with asyncio.timeout(self.plan.duration_s + _FINISH_S + self.plan.calm_s):
                living = self._loop.create_task(self._live())
                await asyncio.wait((living, self.checks.enough), return_when=asyncio.FIRST_COMPLETED)
                if living.done():
                    living.result()
        finally:
            self.end()

    async def _live(self) -> None:
        cluster, checks = self._cluster, self.checks
        cluster.start()
        background = [self._loop.create_task(checks.run()), self._loop.create_task(self._collect())]
        if self.plan.supervised_by_up:
            background.append(self._loop.create_task(UpsRestarts(cluster).run()))
        else:
            Restarts(cluster)
        strikes = FaultInjector(cluster, checks) if self._wide is None else WideChanges(cluster, self._wide)
        striking = self._process("strikes", strikes.run())
        clients = [SimulatedClient(plan, cluster, checks, self.tally) for plan in self.plan.clients]
        asking = [self._process(f"client-{client.plan.number}", client.run()) for client in clients]
        if self._operator is not None:
            background.append(self._loop.create_task(self._look_at_leaders()))
            asking.append(self._process("operator", self._operator.run()))
        for process in (*asking, striking):
            self._look_at(process.name, await process.ended)
        await asyncio.sleep(max(0.0, self.plan.duration_s - self._loop.time()))
        cluster.network.heal_all()
        if self._leaders is not None:
            await asyncio.sleep(self._leaders.at_the_end())
            self._leaders.one_instructs()
        await asyncio.sleep(self.plan.calm_s)
        checks.look()
        if self._leaders is not None:
            self._leaders.none_noticed(self.tally.by_outcome)
            checks.reached["leaders that instructed"] = len(self._leaders.reached_leaders)
        if self._wide is not None:
            self._wide.all_complete(self.tally.by_outcome)
        await self._process("last-look", self._last_look(clients)).ended
        await checks.at_rest()
        for task in background:
            if task.done():
                task.result()
            task.cancel()

    async def _look_at_leaders(self) -> None:
        assert self._leaders is not None
        while True:
            await asyncio.sleep(LOOK_S)
            self._leaders.look()

    async def _last_look(self, clients: list[SimulatedClient]) -> None:
        """Checks that each session has each turn once."""
        for client in clients:
            for conversation in client.questions.conversations[-20:]:
                if conversation.given_up:
                    continue
                stored = await client.sessions.stored(conversation)
                if stored is not None:
                    client.sessions.check(conversation, stored)

    def _look_at(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            raise RuntimeError(f"{name} of the simulator failed") from error

    def _process(self, name: str, main: Coroutine[Any, Any, None]) -> Process:
        process = Process(name, SimulatedMachine(name), self._loop, _rng(self.plan, name))
        process.on_end.append(lambda: self._cluster.network.process_ended(process))
        process.start(main)
        return process

    async def _collect(self) -> None:
        """Runs the garbage collector at fixed times.

        Closing what it finds runs the code of whichever process left it.
        """
        for times in itertools.count(1):
            await asyncio.sleep(_COLLECT_EVERY_S)
            gc.collect(1 if times % _COLLECT_ALL_EVERY else 2)

    def figures(self) -> dict[str, Any]:
        """Returns what else was measured."""
        if self._wide is None:
            return {}
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        return {"messages": self._cluster.network.num_sent, "peak_memory_mib": peak_mib, **self._wide.figures}

    def end(self) -> None:
        """Kills every service that still runs."""
        self._cluster.stopping = True
        for service in self._cluster.services:
            if service.process is not None and service.process.state is not State.ENDED:
                service.process.kill()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Records what asyncio reports.

        That is a callback that raised, or a task whose exception nobody retrieved.
        """
        task = context.get("task")
        if task is not None and task.get_coro().cr_frame is None:
            return  # it belongs to a killed process
        error = context.get("exception")
        self.checks.violated(BrokenPromise.TASK, f"{context.get('message')}: {error!r}"[:300])


def _unraisable(raised: Any) -> None:
    """Ignores the error of a killed process's coroutine that awaits again while it is closed."""
    if "coroutine ignored GeneratorExit" not in str(raised.exc_value):
        sys.__unraisablehook__(raised)


def _wall_offset_s() -> float:
    owner = OWNER.get()
    return owner.machine.wall_offset_s if isinstance(owner, Process) else 0.0


def _rng(plan: SimulationPlan, name: str) -> Any:
    import random

    return random.Random(f"{plan.seed} {name}")
