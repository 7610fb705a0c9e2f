"""Draws the plan of a seed.

Swarm testing (Groce et al., 2012): each seed draws which kinds of faults and clients it has at all, so that no
kind hides another.

Seeds from `MODELS_FROM` on may have nodes with several models, those from `LOAD_FROM` on also nodes
that become slow, long prompts, requests that are sent to two routers, and little room for prompts,
those from `ACCESS_FROM` on also keys of tenants, which are replaced and revoked, those from
`LIMITS_FROM` on also limits of tenants at a server that is sometimes away, and those from `ENGINES_FROM` on
also nodes with engines of others, and a reserve. Those from `LEADERS_FROM` on have several orchestrators, see `leaders`,
and those from `WIDE_FROM` on many nodes, see `wide`.
Smaller seeds mean what they meant before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from ryzanstein.lab.simulation.planning.leaders import leaders_plan
from ryzanstein.lab.simulation.planning.plan import (
    ACCESS_FROM,
    ENGINES_FROM,
    FURTHER_MODELS,
    LEADERS_FROM,
    LIMITS_FROM,
    LOAD_FROM,
    MODEL_FAULTS,
    MODELS_FROM,
    ROUTER_FAULTS,
    WIDE_FROM,
    ClientPlan,
    Kind,
    LimitsPlan,
    ModelPlan,
    NodePlan,
    PlannedFault,
    SimulationPlan,
)
from ryzanstein.lab.simulation.planning.wide import wide_plan

_SWARM = tuple(Kind)[: tuple(Kind).index(Kind.CRASH_MODEL)]


def plan(seed: int, num_nodes: int = 0, num_routers: int = 0, duration_s: float = 0.0) -> SimulationPlan:
    """Returns everything that the seed decides before the simulation begins. Only wide plans may be given a size."""
    if seed >= WIDE_FROM:
        return wide_plan(seed, num_nodes, num_routers, duration_s)
    if seed >= LEADERS_FROM:
        return leaders_plan(seed)
    rng = random.Random(f"plan {seed}")
    kinds = [kind for kind in _SWARM if rng.random() < 0.3]
    num_nodes = rng.choice((1, 1, 2, 2, 3, 4))
    num_routers = rng.choice((1, 1, 2, 3))
    duration_s = rng.choice((60.0, 120.0, 300.0, 900.0, 3600.0, 7200.0))
    idle = _idle(rng, duration_s)
    session_store = "memory" if num_routers == 1 and rng.random() < 0.3 else "sqlite"
    if session_store == "memory":
        # The memory store loses everything with its router, as documented.
        kinds = [kind for kind in kinds if kind not in (Kind.KILL_ROUTER, Kind.RESTART_ROUTER)]
    faults = _faults(rng, kinds, duration_s, num_nodes, num_routers)
    faults += _hiccups(rng, idle, len(faults), num_nodes)
    planned = SimulationPlan(
        seed=seed,
        duration_s=duration_s,
        nodes=_nodes(rng, num_nodes),
        num_routers=num_routers,
        session_store=session_store,
        max_running=rng.choice((8, 4096, 4096)),
        policy=rng.choice(("affinity", "affinity", "bounded")),
        supervised_by_up=rng.random() < 0.4,
        latency_s=rng.choice((0.0001, 0.0005, 0.005)),
        seldom=duration_s >= 900,
        max_tokens=150_000 if rng.random() < 0.03 else round(min(8_000, max(2_000, 2 * duration_s))),
        idle=idle,
        clients=tuple(_interrupting(_client(rng, number, duration_s), seed) for number in range(rng.randint(1, 5))),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        # Drawn from separate generators, so that the rest of a plan is what it was before these
        # existed.
        unread_grace_s=random.Random(f"grace {seed}").choice((5.0, 5.0, 1.0, 0.1)),
        unread_turns=random.Random(f"turns {seed}").choice(("keep", "keep", "drop")),
    )
    planned = _with_models(planned, random.Random(f"models {seed}")) if seed >= MODELS_FROM else planned
    planned = _with_load(planned, random.Random(f"load {seed}")) if seed >= LOAD_FROM else planned
    planned = _with_access(planned, random.Random(f"access {seed}")) if seed >= ACCESS_FROM else planned
    planned = _with_limits(planned, random.Random(f"limits {seed}")) if seed >= LIMITS_FROM else planned
    return _with_engines(planned, random.Random(f"engines {seed}")) if seed >= ENGINES_FROM else planned


def _with_engines(planned: SimulationPlan, rng: random.Random) -> SimulationPlan:
    """Returns the plan with engines of others on some or all nodes, and in two of three plans with a reserve of one node."""
    numbers, share = range(len(planned.nodes)), rng.choice((0.0, 0.5, 0.5, 1.0))
    foreign = frozenset(number for number in numbers if rng.random() < share)
    reserve = frozenset({rng.choice(numbers)}) if len(numbers) > 1 and rng.random() < 2 / 3 else frozenset[int]()
    return replace(planned, foreign=foreign, reserve=reserve)


def _with_limits(planned: SimulationPlan, rng: random.Random) -> SimulationPlan:
    """Returns the plan with limits, and times in which their server is away. `rank` chooses whether it hangs then."""
    limits = LimitsPlan(
        requests_per_second=rng.choice((1.0, 5.0, 50.0)),
        burst=rng.choice((1, 5, 20)),
        tokens_per_minute=rng.choice((5_000, 50_000, 1_000_000)),
        concurrent=rng.choice((1, 2, 8)),
    )
    faults, number = list(planned.faults), 1 + max((fault.number for fault in planned.faults), default=-1)
    pace_s, at = rng.choice((30.0, 120.0)), rng.uniform(5.0, 60.0)
    while at < planned.duration_s and number < 600:
        lasts_s = round(rng.choice((0.2, 3.0, 30.0, 120.0)) * rng.uniform(0.5, 1.5), 3)
        faults.append(PlannedFault(number, Kind.LIMITS_AWAY, round(at, 3), lasts_s, rank=rng.randrange(2)))
        number += 1
        at += lasts_s + rng.expovariate(1 / pace_s)
    return replace(planned, limits=limits, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _with_access(planned: SimulationPlan, rng: random.Random) -> SimulationPlan:
    """Returns the plan with keys of one to three tenants. `target` of a replacement chooses the client."""
    faults, number = list(planned.faults), 1 + max((fault.number for fault in planned.faults), default=-1)
    pace_s, at = rng.choice((10.0, 30.0, 120.0)), rng.uniform(5.0, 20.0)
    while at < planned.duration_s and number < 500:
        faults.append(PlannedFault(number, Kind.REPLACE_KEY, round(at, 3), 0.0, rng.randrange(len(planned.clients))))
        number += 1
        at += rng.expovariate(1 / pace_s)
    return replace(planned, tenants=rng.choice((1, 2, 3)), faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _with_load(planned: SimulationPlan, rng: random.Random) -> SimulationPlan:
    """Returns the plan with nodes that become slow, long prompts, requests sent twice, and room for few prompts."""
    clients = tuple(
        replace(client, longest_words=rng.choice((8, 100, 400)), twice=rng.choice((0.0, 0.3, 1.0)))
        for client in planned.clients
    )
    faults = (*planned.faults, *_slow_nodes(rng, 1 + max((fault.number for fault in planned.faults), default=-1), planned))
    return replace(
        planned,
        clients=clients,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        max_held_prompt_bytes=rng.choice((2**16, 2**20, 128 * 2**20)),
    )


def _slow_nodes(rng: random.Random, number: int, planned: SimulationPlan) -> Iterator[PlannedFault]:
    """Yields times in which a node, or in every third plan each of them, computes slowly. `rank` chooses how slowly."""
    targets = range(len(planned.nodes)) if rng.random() < 0.3 else (rng.randrange(len(planned.nodes)),)
    at = rng.uniform(5.0, 40.0)
    while at < planned.duration_s and number < 400:
        lasts_s, speed = round(rng.choice((10.0, 60.0, 120.0)) * rng.uniform(0.5, 1.5), 3), rng.randrange(4)
        for target in targets:
            yield PlannedFault(number, Kind.SLOW_NODE, round(at, 3), lasts_s, target, speed)
            number += 1
        at += lasts_s + rng.expovariate(1 / 60.0)


def _with_models(planned: SimulationPlan, rng: random.Random) -> SimulationPlan:
    """Returns the plan with further models on its nodes, and faults that strike one model."""
    names = FURTHER_MODELS[: rng.choice((0, 1, 1, 2))]
    if not names:
        return planned
    models = tuple(_model(rng, name, len(planned.nodes)) for name in names)
    aimed = tuple(replace(fault, model=rng.randrange(6)) for fault in planned.faults)
    faults = (*aimed, *_model_faults(rng, 1 + max((fault.number for fault in aimed), default=-1), planned))
    return replace(planned, more_models=models, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _model(rng: random.Random, name: str, num_nodes: int) -> ModelPlan:
    context = rng.choice((4096, 16_384))
    always = rng.randrange(num_nodes)
    return ModelPlan(
        name,
        step_s=rng.choice((0.002, 0.005, 0.02, 0.05)),
        context_length=context,
        num_blocks=max(context // 16, rng.choice((512, 4096))),
        nodes=frozenset(node for node in range(num_nodes) if node == always or rng.random() < 0.8),
    )


def _model_faults(rng: random.Random, number: int, planned: SimulationPlan) -> Iterator[PlannedFault]:
    """Yields strikes on single models, a few to many per simulation."""
    kinds = [kind for kind in MODEL_FAULTS if rng.random() < 0.5] or [Kind.KILL_RANK]
    pace_s = rng.choice((5.0, 20.0, 60.0))
    at = rng.uniform(5.0, 30.0)
    while at < planned.duration_s and number < 300:
        kind = rng.choice(kinds)
        target, rank, model = rng.randrange(len(planned.nodes)), rng.randrange(4), rng.randrange(6)
        yield PlannedFault(number, kind, round(at, 3), _lasts(rng, kind), target, rank, model=model)
        number += 1
        at += rng.expovariate(1 / pace_s) if rng.random() < 0.8 else rng.uniform(0.1, 0.3) * planned.duration_s


def _nodes(rng: random.Random, count: int) -> tuple[NodePlan, ...]:
    tp = rng.choice((1, 2, 2, 4))
    step_s = rng.choice((0.002, 0.005, 0.02, 0.05))
    context = rng.choice((4096, 16_384, 131_072))
    uneven = rng.random() < 0.3
    return tuple(
        NodePlan(
            tp,
            step_s,
            context // 2 if uneven and number % 2 else context,
            num_blocks=max(context // 16, rng.choice((512, 16_384))),
            max_sequences=rng.choice((4, 64)),
        )
        for number in range(count)
    )


def _idle(rng: random.Random, duration_s: float) -> tuple[tuple[float, float], ...]:
    """Returns the idle spans. Long simulations are idle most of the time."""
    if duration_s < 900 or rng.random() < 0.2:
        return ()
    spans, at = [], rng.uniform(20.0, 120.0)
    while at < duration_s:
        until = at + rng.uniform(0.2, 0.6) * duration_s
        spans.append((at, min(until, duration_s - 60.0)))
        at = until + rng.uniform(20.0, 120.0)
    return tuple(span for span in spans if span[1] > span[0])


def _faults(
    rng: random.Random, kinds: list[Kind], duration_s: float, num_nodes: int, num_routers: int
) -> tuple[PlannedFault, ...]:
    if not kinds:
        return ()
    faults, at, number = [], rng.uniform(5.0, 30.0), 0
    pace_s = rng.choice((3.0, 10.0, 30.0))
    while at < duration_s and number < 200:
        kind = rng.choice(kinds)
        target = rng.randrange(num_routers if kind in ROUTER_FAULTS else num_nodes)
        faults.append(
            PlannedFault(number, kind, round(at, 3), _lasts(rng, kind), target, rng.randrange(4), _toward(rng, num_routers))
        )
        number += 1
        # Clustered: several at once, then nothing for a long time.
        at += rng.expovariate(1 / pace_s) if rng.random() < 0.8 else rng.uniform(0.1, 0.3) * duration_s
    return tuple(faults)


def _hiccups(
    rng: random.Random, idle: tuple[tuple[float, float], ...], number: int, num_nodes: int
) -> tuple[PlannedFault, ...]:
    """Returns the hiccups after long pauses.

    The first steps after a pause take a rank longer, because its caches are cold.
    """
    hiccups = (
        PlannedFault(number + place, Kind.HICCUP, round(ends - 0.5, 3), 3.0, rng.randrange(num_nodes), rng.randrange(4))
        for place, (_, ends) in enumerate(idle)
    )
    return tuple(hiccup for hiccup in hiccups if rng.random() < 0.7)


def _lasts(rng: random.Random, kind: Kind) -> float:
    match kind:
        case Kind.HOLD_ROUTER:
            return round(rng.uniform(0.05, 2.0), 3)
        case Kind.HICCUP:
            return round(rng.uniform(0.2, 1.5), 3)
        case Kind.FREEZE_ROUTER | Kind.FREEZE_NODE | Kind.FREEZE_ALL_NODES | Kind.FREEZE_ORCHESTRATOR:
            return round(rng.choice((0.3, 1.0, 2.5, 5.0, 20.0)) * rng.uniform(0.5, 1.5), 3)
        case Kind.CLOCK_JUMP:
            return round(rng.uniform(-3600, 3600), 3)
        case _:
            return round(rng.choice((0.5, 2.0, 10.0)) * rng.uniform(0.5, 1.5), 3)


def _toward(rng: random.Random, num_routers: int) -> str:
    return rng.choice(("orchestrator", *(f"router-{number}" for number in range(num_routers))))


def _interrupting(client: ClientPlan, seed: int) -> ClientPlan:
    return replace(client, interrupts=random.Random(f"interrupts {seed} {client.number}").choice((0.0, 0.5, 1.0)))


def _client(rng: random.Random, number: int, duration_s: float) -> ClientPlan:
    longest = rng.choice((20, 100, 100, 1000, 1000, 10_000, 100_000))
    return ClientPlan(
        number,
        think_s=rng.choice((0.1, 1.0, 10.0)),
        tokens=(1, longest),
        session=rng.random() < 0.5,
        leaves=rng.choice((0.0, 0.0, 0.1)),
        cancels=rng.choice((0.0, 0.0, 0.1)),
        deadline_s=rng.choice((300.0, 3600.0)),
        short_deadline=rng.choice((0.0, 0.1)),
        choices=rng.choice((1, 1, 1, 3)),
        burst=rng.choice((1, 1, 1, 30)),
        loses_stream=rng.choice((0.0, 0.05, 0.3)),
        resubmits=rng.random() < 0.7,
    )
