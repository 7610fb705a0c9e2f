"""What a cluster is: nodes, their load and state, deployments. Frozen values, standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.open_enum import OpenEnum


class NodeState(OpenEnum):
    """What a node does; numbers as in worker.proto. Only READY takes new work; UNSPECIFIED is a state that a newer node is in
    and this process has no name for: what runs there goes on, nothing new is sent there."""

    UNSPECIFIED = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    RECOVERING = 4
    FAILED = 5


# Why a node drains that is itself again in a moment, in its beats' `reason`: who waits for it need not wait in vain.
STOPS, MODEL_CHANGES = "the node stops", "the model changes"


@dataclass(frozen=True, slots=True)
class Load:
    """What a router needs to choose a node: sequences and KV blocks."""

    running: int = 0
    waiting: int = 0
    capacity: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """How a node is at one moment. `step` counts engine steps: with work pending it must move. `time` is the node's own
    clock, Unix seconds; 0: it did not say. `profiling`: a rank's profiler begins or writes, for which all may stand still."""

    sequence: int = 0
    state: NodeState = NodeState.STARTING
    model: str = ""
    context_length: int = 0
    load: Load = field(default_factory=Load)
    step: int = 0
    reason: str = ""
    time: float = 0.0
    profiling: bool = False

    @property
    def drained(self) -> bool:
        """It drains until somebody takes that back: it neither restarts nor changes its model."""
        return self.state is NodeState.DRAINING and STOPS not in self.reason and MODEL_CHANGES not in self.reason


@dataclass(frozen=True, slots=True)
class Node:
    """A member. `address` is host:port of its WorkerService; times are Unix seconds."""

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
    """A model that should run: a directory on the nodes, and how many nodes should serve it (0: every node)."""

    model: str
    path: str
    replicas: int = 0
