"""The cluster: nodes, their load and state, deployments. Frozen values, standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.open_enum import OpenEnum


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


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a node, by which a router chooses: sequences and KV blocks."""

    running: int = 0
    waiting: int = 0
    capacity: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """A node's report of itself at one moment.

    `step` counts engine steps: it must increase while work is pending. `time` is the node's own
    clock in Unix seconds; 0: not reported. `profiling`: a rank's profiler is starting or writing,
    which may stall all ranks. `other_models` are the names of the node's other models, each on a
    stream of its own; only the first model's beats have them.
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

    @property
    def drained(self) -> bool:
        """Whether it drains until that is undone: it neither restarts nor changes its model."""
        return self.state is NodeState.DRAINING and STOPS not in self.reason and MODEL_CHANGES not in self.reason


@dataclass(frozen=True, slots=True)
class Node:
    """A cluster member. `address` is host:port of its WorkerService; times are Unix seconds."""

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


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model that should run: a directory on the nodes, and how many nodes (0: every node)."""

    model: str
    path: str
    replicas: int = 0
