"""Which models a node serves, as the orchestrator reports it."""

from __future__ import annotations

from ryzanstein.cluster import Node, NodeState


def ready_models(node: Node) -> set[str]:
    """Returns the models that a node serves, also those asleep; none if it was asked to drain."""
    if node.drain_requested:
        return set()
    if not node.plural:
        return {node.model} if node.state is NodeState.READY else set()
    return {each.model for each in node.models if each.state is NodeState.READY or each.asleep}
