"""Draws wide plans: tens to a thousand nodes without ranks, several routers, and changes of many nodes at once.

No answer may be lost or fail in them: there are always nodes left, and clients come back to the next router.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ryzanstein.lab.simulation.planning.patient_client import patient_client
from ryzanstein.lab.simulation.planning.plan import ClientPlan, Kind, NodePlan, PlannedFault, SimulationPlan, WidePlan

_SIZES = ((30, 2), (30, 3), (60, 3), (100, 2), (100, 5))
"""Nodes and routers of a plan for which nobody says otherwise."""
FIRST_CHANGE_S = 34.0
"""Nodes have joined by then, and links without work have been quiet for a while."""
CHANGES = (
    Kind.KILL_MANY,
    Kind.LEAVE_MANY,
    Kind.PART_HALF,
    Kind.KILL_ROUTER,
    Kind.KILL_ORCHESTRATOR,
    Kind.DRAIN_NODE,
)
_CHANGES_MODEL_FROM_S = 300.0
"""Shorter plans do not change the model: a dozen waves take four minutes, and the other changes come meanwhile."""
_LASTS_S = {Kind.LEAVE_MANY: 20.0, Kind.PART_HALF: 30.0, Kind.DRAIN_NODE: 15.0}
_LEAST_S = 10.0
_ROOM_S = 25.0
"""After a change has ended: by then all routers see the same again."""


def wide_plan(seed: int, num_nodes: int = 0, num_routers: int = 0, duration_s: float = 0.0) -> SimulationPlan:
    """Returns the plan of a seed from `WIDE_FROM` on. What is 0 is drawn."""
    rng = random.Random(f"wide {seed}")
    drawn_nodes, drawn_routers = rng.choice(_SIZES)
    drawn_s = rng.choice((120.0, 180.0, 300.0))
    num_nodes, num_routers, duration_s = num_nodes or drawn_nodes, num_routers or drawn_routers, duration_s or drawn_s
    return SimulationPlan(
        seed=seed,
        duration_s=duration_s,
        nodes=(NodePlan(1, 0.05, 16_384, 4096, 64),) * num_nodes,
        num_routers=num_routers,
        session_store="sqlite",
        max_running=4096,
        policy="affinity",
        supervised_by_up=False,
        latency_s=rng.choice((0.0001, 0.0005, 0.005)),
        seldom=False,
        max_tokens=round(100 * duration_s),
        idle=(),
        clients=tuple(_client(rng, number) for number in range(rng.randint(4, 8) + 2 * num_routers)),
        faults=tuple(_changes(rng, duration_s, num_nodes, num_routers)),
        wide=WidePlan(loads_s=(0.5, rng.choice((1.0, 3.0)))),
        calm_s=30.0,
    )


def _changes(rng: random.Random, duration_s: float, num_nodes: int, num_routers: int) -> Iterator[PlannedFault]:
    """Yields each kind once, one after the other, as long as there is time, and then further ones."""
    kinds, at_s, number = list(CHANGES), FIRST_CHANGE_S + rng.uniform(0.0, 5.0), 0
    rng.shuffle(kinds)
    if duration_s >= _CHANGES_MODEL_FROM_S:
        kinds.insert(0, Kind.CHANGE_MODEL)
    while kinds and at_s + _LEAST_S < duration_s:
        kind = kinds.pop(0)
        lasts_s = _LASTS_S.get(kind, 0.0) * rng.uniform(0.8, 1.2)
        target = rng.randrange(num_routers if kind is Kind.KILL_ROUTER else num_nodes)
        yield PlannedFault(number, kind, round(at_s, 3), round(lasts_s, 3), target)
        number += 1
        at_s += lasts_s + _ROOM_S + rng.uniform(0.0, 10.0)
        if not kinds:
            kinds = rng.sample(CHANGES, 3)


def _client(rng: random.Random, number: int) -> ClientPlan:
    return patient_client(rng, number, thinks_s=(0.5, 2.0, 5.0), most_tokens=(20, 100, 200), deadline_s=120.0)
