"""Answers of a minute and more, struck late.

They are then older than a generation waits for a node. Some run on the only node.

Mostly no node is left that could take over at once. What is promised is patience: answers continue
when a node is back, and none fails.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ryzanstein.lab.chaos.fault import Fault, FaultBounds, Resume, Scope, Sign, Strike, Victim
from ryzanstein.lab.chaos.faults.nodes import DEATH_S, FROZEN_S, LINK_DOWN, SUSPECTED
from ryzanstein.lab.chaos.stage.layouts import ALONE, LONG, ClusterLayout
from ryzanstein.lab.chaos.stage.signals import send, stopped
from ryzanstein.lab.chaos.stage.stage import Stage
from ryzanstein.lab.chaos.trial.series import LATE_S

RUNS = 10
_FREEZE_S = 2.5
_STALL_S, _SERVING_S = 3.0, 5.0
# The time that a supervisor takes to restart what ended.
_SUPERVISOR_S = 1.0
# A rank's restart takes longer, and so does a freeze.
_IN_FLIGHT_S = 0.1
_RANKS_LOST = Sign("node", "ranks lost")


@asynccontextmanager
async def _rank_of_each(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    for node_id in stage.cluster.node_ids:
        send(victim.rng.choice(stage.rank_pids[node_id]), signal.SIGKILL)
    yield frozenset(stage.cluster.node_ids)


@asynccontextmanager
async def _all_agents_frozen(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with stopped([stage.cluster.services[node_id].pid for node_id in stage.cluster.node_ids]):
        await asyncio.sleep(_FREEZE_S)
    yield frozenset(stage.cluster.node_ids)


@asynccontextmanager
async def _all_agents_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    for node_id in stage.cluster.node_ids:
        stage.cluster.kill(node_id)
    await asyncio.sleep(_SUPERVISOR_S)
    for node_id in stage.cluster.node_ids:
        stage.cluster.services[node_id].kill()
        stage.cluster.services[node_id].start()
    yield frozenset(stage.cluster.node_ids)


@asynccontextmanager
async def _agent_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    stage.cluster.kill(victim.node_id)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _rank_0_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(stage.rank_pids[victim.node_id][0], signal.SIGKILL)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _rank_1_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    send(stage.rank_pids[victim.node_id][1], signal.SIGKILL)
    yield frozenset({victim.node_id})


@asynccontextmanager
async def _rank_stopped(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    async with stopped([victim.rng.choice(stage.rank_pids[victim.node_id])]):
        yield frozenset({victim.node_id})
        await asyncio.sleep(_STALL_S)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A layout whose faults strike the same answers, one after another.

    It is only promised that a node can take these again, not when.
    """

    layout: ClusterLayout

    def fault(self, name: str, what: str, strike: Strike, signs: tuple[Sign, ...], bounds: FaultBounds) -> Fault:
        return Fault(
            name,
            f"{what}, at least {LATE_S:g} s into answers of a minute",
            strike,
            signs,
            self.layout,
            scope=Scope.ALL,
            resumes=Resume.ANY,
            bounds=bounds,
            most_runs=RUNS,
            in_flight_s=_IN_FLIGHT_S,
        )


_long, _alone = _Layout(LONG), _Layout(ALONE)
_KILLED = FaultBounds(DEATH_S, _SERVING_S, None)
FAULTS = (
    _long.fault("late_rank_of_each_node", "SIGKILL of a rank of every node at once", _rank_of_each, (_RANKS_LOST,), _KILLED),
    _long.fault(
        "late_all_agents_frozen",
        f"SIGSTOP of all agents for {_FREEZE_S:g} s",
        _all_agents_frozen,
        (SUSPECTED, LINK_DOWN),
        FaultBounds(FROZEN_S, rerouted_s=None),
    ),
    replace(
        _long.fault("late_sigkill_agent", "SIGKILL of a node's agent", _agent_killed, (LINK_DOWN,), FaultBounds(DEATH_S)),
        scope=Scope.NODE,
        resumes=Resume.MOVED,
        in_flight_s=0.0,
    ),
    _alone.fault("alone_rank_0_killed", "SIGKILL of rank 0 of the only node", _rank_0_killed, (_RANKS_LOST,), _KILLED),
    _alone.fault("alone_rank_1_killed", "SIGKILL of rank 1 of the only node", _rank_1_killed, (_RANKS_LOST,), _KILLED),
    _alone.fault(
        "alone_rank_stopped",
        "SIGSTOP of a rank of the only node",
        _rank_stopped,
        (_RANKS_LOST, SUSPECTED),
        FaultBounds(_STALL_S, _SERVING_S, None),
    ),
    _alone.fault(
        "alone_agent_killed",
        f"SIGKILL of the only node's agent, restarted {_SUPERVISOR_S:g} s later",
        _all_agents_killed,
        (LINK_DOWN,),
        FaultBounds(DEATH_S, rerouted_s=None),
    ),
)
