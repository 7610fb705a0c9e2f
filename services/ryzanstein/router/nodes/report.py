"""Reports for operators: each link's state, and recent losses. No decision uses them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from ryzanstein.cluster import OWN_ENGINE, EngineTraits, NodeState
from ryzanstein.router.nodes.breaker import BreakerState

MAX_LOSSES = 32


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The state of one link.

    `node_id` is empty if the address never answered, `suspicion` while there is none.
    `clock_skew_s`: the node's clock minus this router's, including the network delay.
    """

    node_id: str
    address: str
    up: bool
    suspicion: str
    breaker: BreakerState
    inflight: int
    state: NodeState
    reason: str
    clock_skew_s: float
    failure: str = ""
    """Why the last try to connect failed."""
    engine: EngineTraits = OWN_ENGINE
    reserve: bool = False


@dataclass(frozen=True, slots=True)
class LinkLoss:
    """A link that ended with `inflight` attempts on it, at Unix seconds."""

    at: float
    node_id: str
    cause: str
    inflight: int


class RecentLosses:
    """The last MAX_LOSSES link losses."""

    def __init__(self) -> None:
        self._losses: deque[LinkLoss] = deque(maxlen=MAX_LOSSES)

    @property
    def all(self) -> tuple[LinkLoss, ...]:
        """All of them, oldest first."""
        return tuple(self._losses)

    def add(self, node_id: str, cause: str, inflight: int) -> None:
        self._losses.append(LinkLoss(time.time(), node_id, cause, inflight))
