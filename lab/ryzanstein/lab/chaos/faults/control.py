"""All but the nodes: routers, the orchestrator, clients, clocks, other work on the same cores."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ryzanstein.cli.processes.cluster import ORCHESTRATOR
from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.faults.nodes import LINK_DOWN, SUSPECTED
from ryzanstein.lab.chaos.machines.child import Child
from ryzanstein.lab.chaos.stage.layouts import CLOCKS, ROUTERS
from ryzanstein.lab.chaos.stage.stage import Stage

BUSY_S = 20.0
_SPINNERS = 4
_AWAY_S = 0.5
_HOUR_S = 3600


@asynccontextmanager
async def _kill_router(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    stage.cluster.kill(victim.router)
    yield frozenset()


@asynccontextmanager
async def _kill_orchestrator(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    stage.cluster.kill(ORCHESTRATOR)
    yield frozenset()


@asynccontextmanager
async def _client_leaves(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    await stage.load.client_of(victim.reading).go_away(_AWAY_S)
    yield frozenset()


@asynccontextmanager
async def _clock_jumps(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Turns a clock an hour ahead or back, then right again.

    It is the clock of the answering node, the router or the orchestrator.
    """
    clocks = stage.plan.clocks
    assert clocks is not None, "the layout has clocks"
    whose = victim.rng.choice([victim.node_id, victim.router, ORCHESTRATOR])
    clocks.turn(whose, victim.rng.choice([_HOUR_S, -_HOUR_S]))
    try:
        yield frozenset({victim.node_id})
    finally:
        clocks.turn(whose, 0)


@asynccontextmanager
async def _busy(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    spinners = [Child((sys.executable, "-I", "-S", "-c", "while True: pass")) for _ in range(_SPINNERS)]
    try:
        for spinner in spinners:
            spinner.start()
        yield frozenset()
    finally:
        for spinner in spinners:
            await asyncio.to_thread(spinner.kill)


FAULTS = (
    Fault(
        "router_sigkill",
        "SIGKILL of one of two routers; clients attach at the other",
        _kill_router,
        layout=ROUTERS,
        scope=Scope.ROUTER,
        resumes=Resume.REJOINED,
    ),
    Fault(
        "orchestrator_sigkill",
        "SIGKILL and restart of the orchestrator",
        _kill_orchestrator,
        (Sign("node", "orchestrator unavailable"),),
        scope=Scope.ALL,
        resumes=Resume.ANY,
    ),
    Fault(
        "client_gone_and_back",
        f"a client drops its connection and attaches {_AWAY_S} s later",
        _client_leaves,
        scope=Scope.READER,
        resumes=Resume.REJOINED,
        kinds=("greedy", "sampled", "n3", "stop", "session", "sse", "websocket"),
    ),
    Fault(
        "clock_jump",
        "the wall clock of a node, router or orchestrator jumps by an hour, ahead or back",
        _clock_jumps,
        (SUSPECTED, LINK_DOWN),
        CLOCKS,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        lasts_s=1.5,
    ),
    Fault(
        "busy_cpu",
        f"no fault: {_SPINNERS} busy processes beside the cluster for {BUSY_S:g} s",
        _busy,
        (SUSPECTED, LINK_DOWN),
        scope=Scope.ALL,
        resumes=Resume.ANY,
        lasts_s=BUSY_S,
        runs_divisor=10,
        counts_beats=True,
        bounds=FaultBounds(rerouted_s=None),
    ),
)
