"""The state of a cluster: members, ranks, one router's links, models, sessions.

Values only; times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.cluster import ModelReport, Node, NodeState


@dataclass(frozen=True, slots=True)
class ProtectionView:
    """How a service is protected. `tls` is empty if it does not say; `certificate_expires` is 0 without a certificate."""

    insecure: bool = False
    tls: str = ""
    certificate_expires: float = 0.0
    certificate_life_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineView:
    """What computes a node's tokens. `name` is empty for the node's own engine; `unsupported` are parameters and calls.

    `exact`: an answer that it continues is the undisturbed one. `reserve`: the node answers only where no other can.
    """

    name: str = ""
    unsupported: tuple[str, ...] = ()
    exact: bool = True
    reserve: bool = False


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank. `loaded_bytes` of `load_bytes` are read of its weights, while it loads them."""

    rank: int
    pid: int
    phase: str
    step: int
    since_progress_s: float
    last_step_s: float
    resident_bytes: int
    loaded_bytes: int = 0
    load_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What a model's ranks counted since they started: counts that become smaller are of other ranks. `waiting` by priority."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    waiting: dict[int, int] = field(default_factory=dict)
    expected_wait_s: float = 0.0
    kv_blocks_cached: int = 0
    hot_pages_held: int = 0
    hot_pages_cached: int = 0
    pages_sealed: int = 0
    kv_bytes_borrowed: int = 0
    kv_bytes_lent: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of seconds. `counts[i]` values were at most `upper_bounds[i]`; the last count is of all."""

    upper_bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    sum: float = 0.0

    def since(self, before: Distribution) -> Distribution:
        """Returns what was observed after an earlier sample; all of it where that is of another start."""
        if before.upper_bounds != self.upper_bounds or any(
            new < old for new, old in zip(self.counts, before.counts, strict=True)
        ):
            return self
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        return Distribution(self.upper_bounds, counts, self.sum - before.sum)

    def plus(self, other: Distribution) -> Distribution:
        """Returns what both observed; this one alone where the other has other bounds."""
        if not self.upper_bounds or self.upper_bounds != other.upper_bounds:
            return self if self.upper_bounds else other
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Distribution(self.upper_bounds, counts, self.sum + other.sum)

    def quantile(self, share: float) -> float | None:
        """Returns the value below which this share lies, linear within its bucket; None of no value.

        It is the method of Prometheus' `histogram_quantile`: what lies above the last bound counts as that bound.
        """
        if not self.counts or not self.counts[-1]:
            return None
        wanted, below, from_s = share * self.counts[-1], 0, 0.0
        for bound, count in zip(self.upper_bounds, self.counts, strict=False):
            if count >= wanted and count > below:
                return from_s + (bound - from_s) * (wanted - below) / (count - below)
            below, from_s = count, bound
        return from_s


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """What a router counted since `start_time`, of all models. `ended` are generations by outcome."""

    start_time: float = 0.0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    waiting: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    failovers: int = 0
    time_to_first_token: Distribution = Distribution()
    time_per_output_token: Distribution = Distribution()


@dataclass(frozen=True, slots=True)
class RouterMember:
    """A router of the cluster, as it made itself known. `address` is empty where it did not say it."""

    router_id: str
    address: str
    draining: bool = False
    tls: bool = False


@dataclass(frozen=True, slots=True)
class RankLossView:
    """Why a node's ranks were restarted: the blamed rank, the cause, what the rank did, and the stacks of its crash."""

    time: float
    rank: int
    cause: str
    message: str
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node with one of its models, and its own report; `error` says why there is no report.

    `member`: the orchestrator knows the node. `further`: it stands for a further model of the node,
    and its `node_id` ends with that model's name. `report`: the orchestrator's report of the model.
    """

    node: Node
    ranks: tuple[RankView, ...] = ()
    rank_restarts: int = 0
    error: str = ""
    reason: str = ""
    recent_losses: tuple[RankLossView, ...] = ()
    member: bool = True
    further: bool = False
    report: ModelReport | None = None
    protection: ProtectionView = ProtectionView()
    engine: EngineView = EngineView()
    figures: EngineFigures | None = None
    """None: an older node, or one that did not answer."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """One router's stream to a node.

    `node_id` is empty until the address first answers; `suspicion` is empty if the node is not
    suspected.
    """

    node_id: str
    address: str
    up: bool
    suspicion: str
    breaker: str
    inflight: int
    state: NodeState
    reason: str
    clock_skew_s: float = 0.0
    failure: str = ""
    """Why there is no stream."""
    engine: EngineView = EngineView()


@dataclass(frozen=True, slots=True)
class LinkLossView:
    time: float
    node_id: str
    cause: str
    inflight: int


@dataclass(frozen=True, slots=True)
class RouterView:
    """What one router knows first-hand."""

    router_id: str = ""
    links: tuple[LinkView, ...] = ()
    recent_losses: tuple[LinkLossView, ...] = ()
    protection: ProtectionView = ProtectionView()
    figures: RouterFigures | None = None
    """None: an older router, or one that did not answer."""


@dataclass(frozen=True, slots=True)
class OrchestratorView:
    """What the orchestrator says of itself."""

    protection: ProtectionView = ProtectionView()


@dataclass(frozen=True, slots=True)
class ModelView:
    name: str
    context_length: int
    ready_nodes: int


@dataclass(frozen=True, slots=True)
class SessionView:
    session_id: str
    node_id: str
    update_time: float


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """What the services reported. `errors` maps a service to the reason why its part is missing."""

    @property
    def protections(self) -> list[tuple[str, ProtectionView]]:
        """Each service that answered, by its name, and how it is protected."""
        found = [] if "orchestrator" in self.errors else [("orchestrator", self.orchestrator.protection)]
        found += [(each.node.node_id, each.protection) for each in self.nodes if not each.error and not each.further]
        return found if "router" in self.errors else [*found, (self.router.router_id, self.router.protection)]

    @property
    def engines(self) -> dict[str, EngineView]:
        """The engine of each node that says one, by the node's name; where it does not answer, as the router was told."""
        told = {link.node_id: link.engine for link in self.router.links if link.node_id}
        return told | {each.node.node_id: each.engine for each in self.nodes if not each.error}

    nodes: tuple[NodeStatus, ...] = ()
    router: RouterView = field(default_factory=RouterView)
    models: tuple[ModelView, ...] = ()
    sessions: tuple[SessionView, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)
    orchestrator: OrchestratorView = field(default_factory=OrchestratorView)
    routers: tuple[RouterMember, ...] = ()
