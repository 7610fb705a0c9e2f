"""What one seed means: a cluster, its clients, its weather, and its faults, each with its time.

A plan is a value. Leaving out a fault or a client changes nothing about the others, so a failing plan can
be made smaller.
"""

from __future__ import annotations

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
    # Only from `ACCESS_FROM` on.
    REPLACE_KEY = "replace_key"
    # Only from `LIMITS_FROM` on.
    LIMITS_AWAY = "limits_away"
    # Only from `WIDE_FROM` on.
    KILL_MANY = "kill_many"
    LEAVE_MANY = "leave_many"
    PART_HALF = "part_half"
    CHANGE_MODEL = "change_model"
    # Only from `LEADERS_FROM` to `WIDE_FROM`.
    KILL_LEADER = "kill_leader"
    STOP_LEADER = "stop_leader"
    END_LEADER = "end_leader"
    CUT_REDIS = "cut_redis"
    CUT_LEADER = "cut_leader"
    REDIS_AWAY = "redis_away"
    REDIS_SLOW = "redis_slow"
    REDIS_LOSES = "redis_loses"
    REDIS_FORGETS = "redis_forgets"
    ORCHESTRATOR_CLOCK = "orchestrator_clock"


FIRST_MODEL = "demo"
FURTHER_MODELS = ("second", "third")
MODELS_FROM = 10**9
LOAD_FROM = 2 * 10**9
ACCESS_FROM = 3 * 10**9
LIMITS_FROM = 4 * 10**9
ENGINES_FROM = 5 * 10**9
LEADERS_FROM = 6 * 10**9
WIDE_FROM = 7 * 10**9
FOREIGN_LACKS = "ignore_eos"
"""What engines of others do not support, in plans that have some: half of the requests use it."""
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
LEADER_FAULTS = tuple(Kind)[tuple(Kind).index(Kind.KILL_LEADER) :]
"""What strikes orchestrators, of which one leads, and what they share."""
WIDE_FAULTS = (Kind.KILL_MANY, Kind.LEAVE_MANY, Kind.PART_HALF, Kind.CHANGE_MODEL)
"""What happens to many nodes at once."""
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
class LimitsPlan:
    """The limits of each tenant, which all routers share."""

    requests_per_second: float
    burst: int
    tokens_per_minute: int
    concurrent: int


@dataclass(frozen=True, slots=True)
class LeadersPlan:
    """Several orchestrators, of which one leads, and what an operator does meanwhile.

    `rates` are those of the monotonic clocks of the orchestrators, then of the nodes.
    """

    num: int
    rates: tuple[float, ...]
    pause_s: float
    """Between two acts of the operator, in the mean."""
    max_unavailable: float
    beside: bool
    """Whether nodes have the memory for two revisions of a model at once."""

    @property
    def alike(self) -> bool:
        """Whether no two clocks differ by more than the 15 % for which the election is built."""
        return max(self.rates) <= 1.15 * min(self.rates)


@dataclass(frozen=True, slots=True)
class WidePlan:
    """Many nodes without ranks. `loads_s`: how long nodes take to load their model, from and to.

    `tick_s`: how often a service's clock checks whether its loop is on time; no process stands still in these plans.
    """

    loads_s: tuple[float, float]
    tick_s: float = 1.0


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
    tenants: int = 0
    """Tenants of clients, whose keys the routers ask for; 0: there are no keys."""
    limits: LimitsPlan | None = None
    foreign: frozenset[int] = frozenset()
    """Numbers of the nodes whose engine lacks `FOREIGN_LACKS` and continues inexactly, as they say."""
    reserve: frozenset[int] = frozenset()
    """Numbers of the nodes that are a reserve."""
    leaders: LeadersPlan | None = None
    """None: there is one orchestrator, which shares nothing."""
    wide: WidePlan | None = None
    """None: nodes have ranks."""
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
