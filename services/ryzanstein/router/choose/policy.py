"""Policies: each ranks nodes for a request; a limit says which of them are too full, and `pick` puts those behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ryzanstein.generation import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity, affinity
from ryzanstein.router.choose.limits import Limit, NoLimit
from ryzanstein.router.choose.node_view import NodeView
from ryzanstein.router.choose.recent_load import RecentLoad
from ryzanstein.router.choose.rendezvous import scaled, weight

Score = Callable[[bytes, NodeView], float]


class Policy(Protocol):
    """How one model's requests find their nodes."""

    @property
    def name(self) -> str: ...

    @property
    def keyed(self) -> bool:
        """A key belongs to a node, the first of its ranking, whatever runs there."""
        ...

    @property
    def homing(self) -> bool:
        """Before all others comes the node that answered the session last, if that is known: a session that once had to leave
        its key's node stays where it went, and where its cache is."""
        ...

    @property
    def limit(self) -> Limit: ...

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        """What the request wants to stay near."""
        ...

    def rank(self, affinity: Affinity, nodes: Sequence[NodeView]) -> list[NodeView]:
        """All these nodes, the one that suits the request best first; of a session's home it knows nothing."""
        ...

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """The request was given to this node."""
        ...


def pick(policy: Policy, affinity: Affinity, ranked: Sequence[NodeView], recent: RecentLoad) -> list[NodeView]:
    """First the two nodes of the ranking that are not too full, the request's and its backup, then the others as they are
    ranked. When all are full, the one that has least to do for its size is first."""
    if policy.homing:
        ranked = sorted(ranked, key=lambda node: node.node_id != affinity.home)
    is_full = policy.limit.exceeded(affinity, ranked, recent)
    free = list(islice((node for node in ranked if not is_full(node)), 2))
    if not free:
        return sorted(ranked, key=lambda node: node.relative_load)
    chosen = {node.node_id for node in free}
    return free + [node for node in ranked if node.node_id not in chosen]


def rendezvous(key: bytes, node: NodeView) -> float:
    """Every node gets the same number of keys."""
    return weight(key, node.node_id)


def by_capacity(key: bytes, node: NodeView) -> float:
    """Every node gets keys in proportion to the sequences that it can run."""
    return scaled(weight(key, node.node_id), node.capacity)


@dataclass(frozen=True, slots=True)
class Sticky:
    """A key's nodes in the key's own order."""

    name: str
    score: Score
    limit: Limit
    homing: bool = False
    keyed: bool = True

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def rank(self, affinity: Affinity, nodes: Sequence[NodeView]) -> list[NodeView]:
        return sorted(nodes, key=lambda node: (self.score(affinity.key, node), node.node_id), reverse=True)

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The node with the fewest sequences for its size; between equals the key's own order decides, so that an idle cluster
    does not send everybody to the first node of a list."""

    name: str
    limit: Limit = field(default_factory=NoLimit)
    homing: bool = False
    keyed: bool = False

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def rank(self, affinity: Affinity, nodes: Sequence[NodeView]) -> list[NodeView]:
        return sorted(nodes, key=lambda node: (node.relative_load, -weight(affinity.key, node.node_id), node.node_id))

    def placed(self, affinity: Affinity, node_id: str) -> None:
        """Nothing is remembered: what was placed shows in the load."""


@dataclass(slots=True)
class RoundRobin:
    """One after the other, whatever they do. Each router has its own `turn`, and begins at another node."""

    name: str
    turn: int = 0
    limit: Limit = field(default_factory=NoLimit)
    homing: bool = False
    keyed: bool = False

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return affinity(request)

    def rank(self, affinity: Affinity, nodes: Sequence[NodeView]) -> list[NodeView]:
        ordered = sorted(nodes, key=lambda node: node.node_id)
        first = self.turn % max(1, len(ordered))
        return ordered[first:] + ordered[:first]

    def placed(self, affinity: Affinity, node_id: str) -> None:
        self.turn += 1
