"""Draws the plans of several orchestrators: one leads, what strikes them, and how fast each clock runs.

In two of three plans nothing else is struck, and no answer may notice it. In the others nodes are killed too.
"""

from __future__ import annotations

import random

from ryzanstein.lab.simulation.planning.patient_client import patient_client
from ryzanstein.lab.simulation.planning.plan import (
    LEADER_FAULTS,
    ClientPlan,
    Kind,
    LeadersPlan,
    NodePlan,
    PlannedFault,
    SimulationPlan,
)

_QUIET_S = 15.0
"""Before the first strike: by then one leads, and nodes serve."""


def leaders_plan(seed: int) -> SimulationPlan:
    """Returns the plan of a seed from `LEADERS_FROM` on."""
    rng = random.Random(f"leaders {seed}")
    num, num_nodes, duration_s = rng.choice((2, 2, 3)), rng.choice((2, 3, 3, 4)), rng.choice((60.0, 90.0, 150.0))
    wild = rng.random() < 0.1
    leaders = LeadersPlan(
        num,
        _rates(rng, num + num_nodes, wild=wild),
        pause_s=rng.choice((1.0, 3.0, 8.0)),
        max_unavailable=rng.choice((0.1, 0.1, 0.5)),
        beside=rng.random() < 0.5,
    )
    return SimulationPlan(
        seed=seed,
        duration_s=duration_s,
        nodes=tuple(NodePlan(1, 0.02, 16_384, 16_384, 64) for _ in range(num_nodes)),
        num_routers=rng.choice((1, 1, 2)),
        session_store="sqlite",
        max_running=4096,
        policy="affinity",
        supervised_by_up=False,
        latency_s=rng.choice((0.0001, 0.0005, 0.005)),
        seldom=False,
        max_tokens=4_000,
        idle=(),
        # Their deadlines are of clocks that run alike.
        clients=() if wild else tuple(_client(rng, number) for number in range(rng.choice((1, 2)))),
        faults=tuple(_faults(rng, duration_s, num_nodes)),
        leaders=leaders,
        calm_s=45.0,
    )


def _rates(rng: random.Random, count: int, *, wild: bool) -> tuple[float, ...]:
    """Returns rates of clocks: all 1, within 15 % of each other, from 0.9 to 1.1, or with anything."""
    slowest, fastest = (0.5, 2.0) if wild else rng.choice(((1.0, 1.0), (1.0, 1.0), (0.935, 1.07), (0.9, 1.1)))
    return tuple(round(rng.choice((slowest, fastest, rng.uniform(slowest, fastest))), 4) for _ in range(count))


def _faults(rng: random.Random, duration_s: float, num_nodes: int) -> list[PlannedFault]:
    kinds = [kind for kind in LEADER_FAULTS if rng.random() < 0.4] or [Kind.KILL_LEADER]
    if Kind.REDIS_FORGETS in kinds and rng.random() < 0.5:
        kinds.remove(Kind.REDIS_FORGETS)
    if rng.random() < 1 / 3:
        kinds.append(Kind.KILL_NODE)
    faults, at, pace_s = list[PlannedFault](), _QUIET_S + rng.uniform(0.0, 10.0), rng.choice((4.0, 10.0, 20.0))
    while kinds and at < duration_s and len(faults) < 40:
        kind = rng.choice(kinds)
        faults.append(
            PlannedFault(len(faults), kind, round(at, 3), _lasts_s(rng, kind), rng.randrange(num_nodes), rank=rng.randrange(6))
        )
        at += rng.expovariate(1 / pace_s)
    return faults


def _lasts_s(rng: random.Random, kind: Kind) -> float:
    if kind is Kind.ORCHESTRATOR_CLOCK:
        return rng.choice((-3600.0, 3600.0))
    return round(rng.choice((0.5, 2.0, 4.0, 7.0, 15.0)) * rng.uniform(0.6, 1.4), 3)


def _client(rng: random.Random, number: int) -> ClientPlan:
    return patient_client(rng, number, thinks_s=(0.1, 1.0), most_tokens=(20, 100, 400), deadline_s=300.0)
