"""Filter, score, pick: from a snapshot of nodes to an ordered list of candidates.

The rule of ADR-003, option D: sticky, but with a bounded queue. A conversation goes to its node unless more than
`queue_bound` sequences wait there; a request that has only a prefix in common with others goes to its node unless that one
carries more than its share (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose.affinity import Affinity
from ryzanstein.router.choose.rendezvous import weight

LOAD_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment. `inflight` counts this router's own attempts there, which the last beat may not know yet;
    `admits`: its breaker lets a request through; `suspected`: it is silent, or pending work does not move."""

    node_id: str
    model: str
    state: NodeState
    load: Load = field(default_factory=Load)
    inflight: int = 0
    admits: bool = True
    suspected: bool = False
    drain_requested: bool = False

    @property
    def sequences(self) -> int:
        """What runs or waits there, as far as is known."""
        return max(self.load.running + self.load.waiting, self.inflight)

    @property
    def waiting(self) -> int:
        return max(self.load.waiting, self.inflight - self.load.capacity if self.load.capacity else 0)


def candidates(
    nodes: Sequence[NodeView],
    model: str,
    wish: Affinity,
    queue_bound: int,
    excluded: Collection[str] = (),
) -> list[str]:
    """Node ids, the best first: the primary, its backup, and the rest. Empty when no node can take the request."""
    usable = [node for node in nodes if is_usable(node, model) and node.node_id not in excluded]
    overloaded = _over_queue(queue_bound) if wish.sticky else _over_share(usable)
    ordered = sorted(usable, key=lambda node: (weight(wish.key, node.node_id), node.node_id), reverse=True)
    ordered.sort(key=overloaded)
    if ordered and overloaded(ordered[0]):
        ordered.sort(key=_relative_load)
    return [node.node_id for node in ordered]


def is_usable(node: NodeView, model: str) -> bool:
    """The filter: it serves the model, takes new work, and nothing speaks against it."""
    if node.model != model or node.state is not NodeState.READY:
        return False
    return node.admits and not node.suspected and not node.drain_requested


def _over_queue(queue_bound: int) -> Callable[[NodeView], bool]:
    return lambda node: node.waiting > queue_bound


def _over_share(nodes: Sequence[NodeView]) -> Callable[[NodeView], bool]:
    total = 1 + sum(node.sequences for node in nodes)
    share = math.ceil(LOAD_FACTOR * total / max(1, len(nodes)))
    return lambda node: node.sequences >= share


def _relative_load(node: NodeView) -> float:
    return node.sequences / max(1, node.load.capacity)
