"""The cluster: nodes, their load and state, deployments. Frozen values, standard library only.

Enums of the wire are open: newer peers send numbers that this process does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from ryzanstein.adapters import DeployedAdapters
from ryzanstein.generation.request import NO_DEFAULTS, SamplingDefaults
from ryzanstein.leaders.epochs import LeaderEpoch

MAX_PLACE_CHARS = 253
"""Of the name of a host or a zone."""


class OpenEnum(IntEnum):
    """An enum that accepts any number, like a proto3 enum.

    An unknown number becomes `UNSPECIFIED`, which every subclass has as 0.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls(0) if isinstance(value, int) and value != 0 else None


class NodeState(OpenEnum):
    """The state of a node, with the numbers of worker.proto. Only READY takes new work.

    UNSPECIFIED is a state of a newer node that this process does not know: what runs there
    continues, and nothing new is sent there.
    """

    UNSPECIFIED = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    RECOVERING = 4
    FAILED = 5


# Values of `reason` in the beats of a node that drains only for a moment: waiting for it makes
# sense.
STOPS, MODEL_CHANGES = "the node stops", "the model changes"
# The `reason` of a node that is STARTING, and will be until it is given a model.
NO_MODEL = "no model is loaded"


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a node, by which a router chooses: sequences and KV blocks."""

    running: int = 0
    waiting: int = 0
    capacity: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class Numerics:
    """What decides a model's tokens on a node, besides the request: how it computes, and with which weights.

    Empty: not known. An older node says neither, and the digest of the weights is computed late or never.
    """

    computed: str = ""
    weights: bytes = b""

    @property
    def num_known(self) -> int:
        """Returns how many of the two are known."""
        return bool(self.computed) + bool(self.weights)

    @property
    def known(self) -> bool:
        return self.num_known > 0

    @property
    def content(self) -> str:
        """The digest of the model's files that is a part of `computed`; empty: not known, or an engine of another maker."""
        return next((part.removeprefix("content=") for part in self.computed.split() if part.startswith("content=")), "")

    def completed(self, later: Numerics) -> Numerics:
        """Returns these with what a later report adds; as they are if it is of something else."""
        if later is self or self.num_known == 2 or self.differs(later):
            return self
        return Numerics(self.computed or later.computed, self.weights or later.weights)

    def differs(self, other: Numerics) -> bool:
        """Returns whether the two are known to compute other tokens."""
        other_way = "" not in (self.computed, other.computed) and self.computed != other.computed
        other_weights = b"" not in (self.weights, other.weights) and self.weights != other.weights
        return other_way or other_weights


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine is and cannot do, as its node reports it.

    `name` has its version, and is empty for the node's own engine. `unsupported` are names of fields of `SamplingParams`,
    and features: "constraint", "embeddings". `continues_exactly`: an answer that it continues is the undisturbed one.
    """

    name: str = ""
    unsupported: frozenset[str] = frozenset()
    continues_exactly: bool = True

    @property
    def product(self) -> str:
        """Its name without the version."""
        return self.name.partition(" ")[0]

    @property
    def lacking(self) -> dict[str, str]:
        """What it does not support, each with the engine's name."""
        return dict.fromkeys(self.unsupported, self.name)


OWN_ENGINE = EngineTraits()
"""The traits of the node's own engine, and of nodes that say nothing of theirs."""


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """What decides whether a node goes on with an answer's tokens as if they were its own.

    `exact`: the engine continues exactly what it or a node that computes alike has begun.
    """

    numerics: Numerics = field(default_factory=Numerics)
    exact: bool = True

    def incompatible(self, other: TokenOrigin) -> bool:
        """Returns whether an answer of both is known to differ from the undisturbed one.

        Where either is not exact, it does: also if both are one node.
        """
        return not (self.exact and other.exact) or self.numerics.differs(other.numerics)

    def completed(self, later: TokenOrigin) -> TokenOrigin:
        """Returns this with what a later report of the same node says of its numerics."""
        numerics = self.numerics.completed(later.numerics)
        return self if numerics is self.numerics else TokenOrigin(numerics, self.exact)


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's report of itself at one moment.

    `step` counts engine steps: it must increase while work is pending. `time` is the node's own
    clock in Unix seconds; 0: not reported. `profiling`: a rank's profiler is starting or writing,
    which may stall all ranks. `other_models` are the names of the node's other models, each on a
    stream of its own; only the first model's beats have them. `sampling_defaults` are the model's own
    values of parameters that requests leave out. `reserve`: the node answers only where no other can. `quiet`: on
    this stream it beats seldom from now on.
    """

    sequence: int = 0
    state: NodeState = NodeState.STARTING
    model: str = ""
    context_length: int = 0
    load: Load = field(default_factory=Load)
    step: int = 0
    reason: str = ""
    time: float = 0.0
    profiling: bool = False
    other_models: tuple[str, ...] = ()
    numerics: Numerics = field(default_factory=Numerics)
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    engine: EngineTraits = OWN_ENGINE
    reserve: bool = False
    quiet: bool = False

    @property
    def drained(self) -> bool:
        """Whether it drains until that is undone: it neither restarts nor changes its model."""
        return self.state is NodeState.DRAINING and STOPS not in self.reason and MODEL_CHANGES not in self.reason


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the ranks are that load a model. `phase` is that of the rank that is furthest behind.

    0 of 0 bytes: it is not known yet how much there is to read. `pack_bytes` are given to be packed for the processor so far.
    """

    phase: str
    loaded_bytes: int = 0
    total_bytes: int = 0
    packed_bytes: int = 0
    pack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model of a node, as the node reports it.

    `revision` is that of the deployment it was loaded for, 0 for what the node was started with.
    `memory_bytes`: the larger of what its ranks may use and what they were seen to use.
    `started_with`: the node was started with a model of this name. `asleep`: unloaded because it
    was idle; a request loads it. `next_*`: the revision that is loaded beside this one, 0 for none;
    a `next_state` of FAILED means that it was refused and this one stays. `progress`: of the revision
    that is being loaded, this one or the next. `content`: the digest of this one's files, empty while it is not known.
    """

    model: str
    path: str = ""
    revision: int = 0
    state: NodeState = NodeState.STARTING
    context_length: int = 0
    load: Load = field(default_factory=Load)
    reason: str = ""
    memory_bytes: int = 0
    started_with: bool = False
    asleep: bool = False
    next_revision: int = 0
    next_state: NodeState = NodeState.UNSPECIFIED
    next_reason: str = ""
    progress: LoadProgress | None = None
    content: str = ""


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """The memory that the model in a directory would take on a node.

    `error`: why it cannot be served there; empty if it can.
    """

    path: str
    bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class MemberAddresses:
    """Where all nodes of a cluster are reached. `digest` is never empty, and the same for the same addresses.

    With `since` only the change is here: to the addresses of that digest `addresses` were added, and `removed` were removed.
    """

    digest: bytes
    addresses: tuple[str, ...] = ()
    since: bytes = b""
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node tells the orchestrator with a beat.

    `needs` answer `Instruction.measure_paths`. `members_digest` is that of `Instruction.members`, as it
    was told them last, empty before; None: an older node, which is not told. So is `adapters_digest`, of
    `Instruction.adapters`. `starts`: of each model that it is to serve and is not ready with, a number that grows whenever the
    start moves; absent where that cannot be seen, and from an older node. `takes_member_changes`: the node understands
    `MemberAddresses.since`.
    """

    beat: Beat | None
    models: tuple[ModelReport, ...] = ()
    memory_bytes: int = 0
    needs: tuple[ModelNeed, ...] = ()
    members_digest: bytes | None = None
    adapters_digest: bytes | None = None
    starts: Mapping[str, int] = field(default_factory=dict)
    takes_member_changes: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A cluster member. `address` is host:port of its WorkerService, `tls_address` with TLS; times are Unix seconds.

    `models` are all its models and `memory_bytes` is what it has for them. An older node reports
    neither: it serves `model`, and one at a time. For others `model`, `state`, `context_length` and
    `load` are those of the first model. `host` is the machine, empty from an older node, and `zone` that of the machine.
    """

    node_id: str
    address: str
    incarnation: str = ""
    tp: int = 1
    state: NodeState = NodeState.STARTING
    model: str = ""
    context_length: int = 0
    load: Load = field(default_factory=Load)
    drain_requested: bool = False
    join_time: float = 0.0
    beat_time: float = 0.0
    models: tuple[ModelReport, ...] = ()
    memory_bytes: int = 0
    tls_address: str = ""
    host: str = ""
    zone: str = ""

    def address_with(self, *, tls: bool) -> str:
        """Returns where a client with or without TLS dials it. Empty: such a client cannot."""
        return self.tls_address if tls else self.address

    @property
    def machine(self) -> str:
        """What it is lost together with: its host. An older node does not name it, and counts as alone."""
        return self.host or self.node_id

    @property
    def plural(self) -> bool:
        """Whether it serves several models, and says how much memory it has for them."""
        return self.memory_bytes > 0

    def report(self, model: str) -> ModelReport | None:
        """Returns its report of a model; that of an older node is made from what it has."""
        if not self.plural and self.model == model:
            return ModelReport(model, state=self.state, context_length=self.context_length, load=self.load)
        for report in self.models:  # a loop costs less than a generator, and this is asked a dozen times of each node at a look
            if report.model == model:
                return report
        return None


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """How a new revision of a model replaces the earlier one. None: as the orchestrator's `tuning.rollout` says.

    `max_unavailable` and `max_failed` are shares of the replicas, from 0 to 1. `allow_outage`: a replica changes also if what
    runs and waits needs it.
    """

    max_unavailable: float | None = None
    min_ready_s: float | None = None
    progress_s: float | None = None
    max_failed: float | None = None
    allow_outage: bool = False


DEFAULT_LIMITS = RolloutLimits()


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model that should run: a directory on the nodes, and how many nodes (0: every node).

    `revision`, from 1, counts how often the files were to be loaded; the orchestrator sets it. A
    node unloads the model after `idle_unload_s` without work; 0: never. `min_replicas` stay ready while
    nodes drain or change; at most `max_replicas` nodes have it, 0: one more than `replicas`, while they
    change. `earlier_path` is the directory before this one; empty: there was none. The orchestrator alone knows the
    others: `outage_revision` may replace the one before it as if `rollout.allow_outage` were set, and
    `idempotency_keys` are those of the last requests for it.
    """

    model: str
    path: str
    replicas: int = 0
    revision: int = 0
    idle_unload_s: float = 0.0
    min_replicas: int = 0
    max_replicas: int = 0
    rollout: RolloutLimits = DEFAULT_LIMITS
    earlier_path: str = ""
    outage_revision: int = 0
    idempotency_keys: tuple[str, ...] = ()

    @property
    def allows_outage(self) -> bool:
        """Whether a replica changes to this revision also if what runs and waits needs it."""
        return self.rollout.allow_outage or 0 < self.outage_revision == self.revision

    @property
    def limit(self) -> int:
        """The most nodes that have it while none changes; 0: every node."""
        return self.replicas or self.max_replicas

    @property
    def surge(self) -> int:
        """How many nodes more may have it while they change."""
        if not self.replicas:
            return 0
        return max(0, self.max_replicas - self.replicas) if self.max_replicas else 1


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a node should do: serve these deployments, and drain.

    What it was started with it serves as well, as far as that fits. `plural` is false from an older
    orchestrator, whose only deployment takes the place of the node's first model.
    `measure_paths` are directories whose memory needs it should report. `members` and `adapters` are None where they
    are what it was told before, or an older orchestrator does not say them. `leader` says it: two instructions that differ in
    nothing else are equal.
    """

    deployments: tuple[Deployment, ...] = ()
    drain: bool = False
    measure_paths: tuple[str, ...] = ()
    plural: bool = True
    members: MemberAddresses | None = None
    adapters: DeployedAdapters | None = None
    leader: LeaderEpoch = field(default=LeaderEpoch(), compare=False)
