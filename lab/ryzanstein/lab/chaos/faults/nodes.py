"""Whole nodes: killed, frozen, drained; one, two, all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.stage.signals import family, stopped
from ryzanstein.lab.chaos.stage.stage import Stage

LINK_DOWN = Sign("router", "link down")
SUSPECTED = Sign("router", "node suspected")
DEATH_S, FROZEN_S = 0.05, 1.0
_DRAIN_S = 15.0


@asynccontextmanager
async def _sigkill(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    stage.cluster.kill(victim.node_id)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _sigstop(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with stopped([stage.cluster.services[victim.node_id].pid]):
        yield frozenset({victim.node_id})


@asynccontextmanager
async def _two_at_once(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    other = victim.rng.choice([node_id for node_id in stage.cluster.node_ids if node_id != victim.node_id])
    for node_id in (victim.node_id, other):
        stage.cluster.kill(node_id)
    yield frozenset({victim.node_id, other})


@asynccontextmanager
async def _all_for_three_seconds(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Stops agents and ranks.

    They continue after three seconds, while the streams are still being read.
    """
    pids = [pid for node_id in stage.cluster.node_ids for pid in family(stage.cluster.services[node_id].pid)]
    async with stopped(pids):
        await asyncio.sleep(3.0)
    yield frozenset()


@asynccontextmanager
async def _drain(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Sends SIGTERM, as a rolling update does; the next run drains the next node."""
    stage.cluster.kill(victim.node_id, signal.SIGTERM)
    yield frozenset({victim.node_id})
    await asyncio.to_thread(stage.cluster.services[victim.node_id].wait_ended, _DRAIN_S)


FAULTS = (
    Fault("sigkill_agent", "SIGKILL of a node's agent", _sigkill, (LINK_DOWN,), bounds=FaultBounds(DEATH_S)),
    Fault(
        "sigstop_agent",
        "SIGSTOP of a node's agent",
        _sigstop,
        (SUSPECTED, LINK_DOWN),
        bounds=FaultBounds(FROZEN_S),
        lasts_s=1.5,
    ),
    Fault("two_nodes_at_once", "SIGKILL of two of three nodes", _two_at_once, (LINK_DOWN,), bounds=FaultBounds(DEATH_S)),
    Fault(
        "all_nodes_3s",
        "SIGSTOP of all agents and ranks for 3 s",
        _all_for_three_seconds,
        (SUSPECTED, LINK_DOWN),
        scope=Scope.ALL,
        resumes=Resume.ANY,
        bounds=FaultBounds(FROZEN_S, rerouted_s=None),
        healthy_left=False,
    ),
    Fault(
        "rolling_drain",
        "SIGTERM and restart of every node in turn",
        _drain,
        (Sign("router", "node changed", {"state": ("DRAINING",)}),),
        resumes=Resume.ANY,
        in_turn=True,
    ),
)
