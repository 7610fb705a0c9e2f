"""Whether the nodes of a model compute the same tokens, and hold contexts of one length.

Nodes with other weights, data types, compression or rules of sparse attention generate other tokens,
so an answer that moves between them is not the undisturbed one. During a rolling change that is so
for a while; afterwards it is a mistake that nothing else shows. Engines of different makers compute other tokens,
and so does a reserve: there it is meant, so only nodes of one maker and purpose are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import structlog

from ryzanstein.cluster import Beat, EngineTraits, Numerics
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.telemetry import CompatibilityMetrics

log = structlog.get_logger(__name__)

_MAX_LISTED = 8


class _HasNumerics(Protocol):
    @property
    def numerics(self) -> Numerics: ...


class _Comparable(_HasNumerics, Protocol):
    @property
    def engine(self) -> EngineTraits: ...

    @property
    def beat(self) -> Beat: ...


_Node = TypeVar("_Node", bound=_HasNumerics)
_LikeLink = TypeVar("_LikeLink", bound=_Comparable)


class NumericsWatch:
    """Shows, for each model, how many kinds of nodes there are that should be alike, in metrics and once in the log."""

    def __init__(self, metrics: CompatibilityMetrics) -> None:
        self._metrics = metrics
        self._kinds: dict[str, int] = {}

    def judge(self, links: Iterable[NodeLink]) -> None:
        """Looks at the nodes that serve a model now."""
        by_model: dict[str, list[NodeLink]] = defaultdict(list)
        for link in links:
            if link.connected and link.serves:
                by_model[link.beat.model].append(link)
        for model in self._kinds.keys() - by_model.keys():
            self._metrics.forget(model)
        self._kinds = {model: self._judged(model, nodes) for model, nodes in by_model.items()}

    def _judged(self, model: str, nodes: Sequence[NodeLink]) -> int:
        examples = kinds_by_mistake(nodes)
        self._metrics.show(model, len(examples), len({link.beat.context_length for link in nodes}))
        if len(examples) > max(1, self._kinds.get(model, 1)):
            nodes_listed = {link.node_id: _listed(link.numerics) for link in examples[:_MAX_LISTED]}
            log.warning("nodes of a model compute other tokens", model=model, kinds=len(examples), nodes=nodes_listed)
        return len(examples)


def kinds_by_mistake(nodes: Sequence[_LikeLink]) -> list[_LikeLink]:
    """Returns the first node of each kind, of those nodes with one product as engine and one purpose that have most kinds."""
    groups: dict[tuple[str, bool], list[_LikeLink]] = defaultdict(list)
    for node in nodes:
        groups[node.engine.product, node.beat.reserve].append(node)
    return max(map(kinds_of, groups.values()), key=len, default=[])


def kinds_of(nodes: Sequence[_Node]) -> list[_Node]:
    """Returns the first node of each kind. A node that does not say how it computes counts as every kind.

    Nodes that say more come first: one that says little would hide those that differ from each other.
    """
    examples: list[_Node] = []
    for node in sorted(nodes, key=lambda node: node.numerics.num_known, reverse=True):
        if all(node.numerics.differs(other.numerics) for other in examples):
            examples.append(node)
    return examples


def _listed(numerics: Numerics) -> str:
    return f"{numerics.computed} digest={numerics.weights.hex()[:16] or 'unknown'}"
