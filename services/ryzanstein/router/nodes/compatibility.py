"""Whether the nodes of a model compute the same tokens, and hold contexts of one length.

Nodes with other weights, data types, compression or rules of sparse attention generate other tokens,
so an answer that moves between them is not the undisturbed one. During a rolling change that is so
for a while; afterwards it is a mistake that nothing else shows. Engines of different makers compute other tokens,
and so does a reserve: there it is meant, so only nodes of one maker and purpose are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from ryzanstein.cluster import Numerics
from ryzanstein.router.nodes.index import ReadyNodes
from ryzanstein.router.telemetry import CompatibilityMetrics

log = structlog.get_logger(__name__)

_MAX_LISTED = 8


class _HasNumerics(Protocol):
    @property
    def numerics(self) -> Numerics: ...


@dataclass(frozen=True, slots=True)
class _Example:
    """A node that computes so."""

    numerics: Numerics
    node_id: str


_Node = TypeVar("_Node", bound=_HasNumerics)


class NumericsWatch:
    """Shows, for each model, how many kinds of nodes there are that should be alike, in metrics and once in the log."""

    def __init__(self, metrics: CompatibilityMetrics) -> None:
        self._metrics = metrics
        self._kinds: dict[str, int] = {}

    def judge(self, model: str, nodes: ReadyNodes | None) -> None:
        """Looks at the nodes that serve a model now; None: there is none."""
        if nodes is None:
            if self._kinds.pop(model, 0):
                self._metrics.forget(model)
            return
        examples = _kinds_by_mistake(nodes)
        self._metrics.show(model, len(examples), len(nodes.contexts))
        if len(examples) > max(1, self._kinds.get(model, 1)):
            nodes_listed = {each.node_id: _listed(each.numerics) for each in examples[:_MAX_LISTED]}
            log.warning("nodes of a model compute other tokens", model=model, kinds=len(examples), nodes=nodes_listed)
        self._kinds[model] = len(examples)


def _kinds_by_mistake(nodes: ReadyNodes) -> list[_Example]:
    """Returns a node of each kind, of those nodes with one product as engine and one purpose that have most kinds."""
    groups = ([_Example(each, next(iter(alike[each]))) for each in alike] for alike in nodes.numerics.values())
    return max(map(kinds_of, groups), key=len, default=[])


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
