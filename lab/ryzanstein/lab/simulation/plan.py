"""What one seed means: a cluster, its clients, its weather, and its faults, each with its time.

Swarm testing (Groce et al., 2012): each seed draws which kinds of faults and clients it has at all,
so that no kind hides another. A plan is a value. Leaving out a fault or a client changes nothing
about the others, so a failing plan can be made smaller.

Seeds from `MODELS_FROM` on may have nodes with several models, those from `LOAD_FROM` on also nodes
that become slow, long prompts, requests that are sent to two routers, and little room for prompts.
Smaller seeds mean what they meant before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


class Kind(Enum):
    """The kind of a fault."""

    KILL_NODE = "kill_node"
    FREEZE_NODE = "freeze_node"
    FREEZE_ALL_NODES = "freeze_all_nodes"
    KILL_RANK = "kill_rank"
    KILL_A_RANK_OF_EACH_NODE = "kill_a_rank_of_each_node"
    STOP_RANK = "stop_rank"
    CRASH_RANK = "crash_rank"
    HANG_RANK = "hang_rank"
    SLOW_RANK = "slow_rank"
    HICCUP = "hiccup"
    DRAIN_NODE = "drain_node"
    NEWER_NODE = "newer_node"
    KILL_ROUTER = "kill_router"
    FREEZE_ROUTER = "freeze_router"
    HOLD_ROUTER = "hold_router"
    RESTART_ROUTER = "restart_router"
    KILL_ORCHESTRATOR = "kill_orchestrator"
    FREEZE_ORCHESTRATOR = "freeze_orchestrator"
    CUT_ONE_WAY = "cut_one_way"
    CUT_BOTH_WAYS = "cut_both_ways"
    RESET = "reset"
    LATENCY = "latency"
    CLOCK_JUMP = "clock_jump"
    STORE_FAILS = "store_fails"
    STORE_FULL = "store_full"
    STORE_SLOW = "store_slow"
    STORE_ODD = "store_odd"
    LOAD_CANCELLED = "load_cancelled"
    # Only where nodes have several models.
    CRASH_MODEL = "crash_model"
    KILL_MODEL_EVERYWHERE = "kill_model_everywhere"
    OUT_OF_MEMORY = "out_of_memory"
    # Only from `LOAD_FROM` on.
    SLOW_NODE = "slow_node"


FIRST_MODEL = "demo"
FURTHER_MODELS = ("second", "third")
MODELS_FROM = 10**9
LOAD_FROM = 2 * 10**9
# What strikes the ranks of one model, and may not disturb the others of its node.
MODEL_FAULTS = (
    Kind.KILL_RANK,
    Kind.KILL_A_RANK_OF_EACH_NODE,
    Kind.STOP_RANK,
    Kind.CRASH_RANK,
    Kind.HANG_RANK,
    Kind.SLOW_RANK,
    Kind.LOAD_CANCELLED,
    Kind.CRASH_MODEL,
    Kind.KILL_MODEL_EVERYWHERE,
    Kind.OUT_OF_MEMORY,
)
_SWARM = tuple(Kind)[: tuple(Kind).index(Kind.CRASH_MODEL)]
ROUTER_FAULTS = (Kind.KILL_ROUTER, Kind.FREEZE_ROUTER, Kind.HOLD_ROUTER, Kind.RESTART_ROUTER)


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault. Times are in seconds.

    `target` is the number of a node or router, `rank` of a rank, `model` of one of the node's models;
    `toward` is the other end of a path.
    """

    number: int
    kind: Kind
    at_s: float
    lasts_s: float
    target: int = 0
    rank: int = 0
    toward: str = ""
    model: int = 0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node. `step_s` is how long a step of one token takes."""

    tp: int
    step_s: float
    context_length: int
    num_blocks: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model besides the first one. `nodes` are the numbers of the nodes that serve it."""

    name: str
    step_s: float
    context_length: int
    num_blocks: int
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """How a client behaves.

    Shares are of its requests; `tokens` is the range of tokens it requests.
    """

    number: int
    think_s: float
    tokens: tuple[int, int]
    session: bool
    leaves: float
    cancels: float
    deadline_s: float
    short_deadline: float
    choices: int
    burst: int
    loses_stream: float
    resubmits: bool
    interrupts: float = 0.0
    """The share of messages after an abandoned one that it sends at once.

    It then does not check what the session has of the abandoned one.
    """
    longest_words: int = 8
    """Of a question outside of a session."""
    twice: float = 0.0
    """The share of requests that are also sent to another router, with the same key, within some seconds."""


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The plan of one seed, see the module.

    `calm_s` follows `duration_s`: no more faults strike, and everything must come to rest.
    """

    seed: int
    duration_s: float
    nodes: tuple[NodePlan, ...]
    num_routers: int
    session_store: str
    max_running: int
    policy: str
    supervised_by_up: bool
    latency_s: float
    seldom: bool
    """Idle services send beats and check less often than by default, so that hours pass quickly."""
    max_tokens: int
    """Clients send no further requests after this many tokens in total."""
    idle: tuple[tuple[float, float], ...]
    """Spans (start, end) in which clients send nothing."""
    clients: tuple[ClientPlan, ...]
    faults: tuple[PlannedFault, ...]
    unread_grace_s: float = 5.0
    unread_turns: str = "keep"
    more_models: tuple[ModelPlan, ...] = ()
    max_held_prompt_bytes: int = 128 * 2**20
    calm_s: float = 90.0

    @property
    def models(self) -> tuple[str, ...]:
        """The names of all models, the first one first."""
        return (FIRST_MODEL, *(model.name for model in self.more_models))

    def models_of(self, node: int) -> tuple[str, ...]:
        """Returns the names of a node's models, the first one first."""
        return (FIRST_MODEL, *(model.name for model in self.more_models if node in model.nodes))

    def context_of(self, node: int, model: str) -> int:
        """Returns the model's context on a node that serves it."""
        lengths = {each.name: each.context_length for each in self.more_models}
        return lengths.get(model, self.nodes[node].context_length)

    def largest_context(self, model: str) -> int:
        return max(self.context_of(node, model) for node in range(len(self.nodes)) if model in self.models_of(node))

    def without(self, *, faults: frozenset[int] = frozenset(), clients: frozenset[int] = frozenset()) -> SimulationPlan:
        """Returns the same plan without some faults and clients."""
        return replace(
            self,
            faults=tuple(fault for fault in self.faults if fault.number not in faults),
            clients=tuple(client for client in self.clients if client.number not in clients),
        )


def plan(seed: int) -> SimulationPlan:
    """Returns everything that the seed decides before the simulation begins."""
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
    return _with_load(planned, random.Random(f"load {seed}")) if seed >= LOAD_FROM else planned


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
