"""Why no further node takes a deployment, in a few words."""

from __future__ import annotations

from collections.abc import Collection

from ryzanstein.cli.display import binary_bytes
from ryzanstein.cli.rollout.deployments import Assignments, DeploymentView, Shortage

_LISTED = 4


def why_not_more(look: Assignments, model: str, assigned: Collection[str]) -> str:
    """Returns how many nodes there are, and why those that are not assigned do not take the model."""
    drained = {node.node_id for node in look.nodes.values() if node.drain_requested}
    view = look.deployments.get(model)
    short = [each for each in (() if view is None else view.shortages) if each.node_id not in drained | set(assigned)]
    counts = ((len(drained), "drained"), (len(_taken(look, model)), "assigned to other models"))
    given = [f"the cluster has {len(look.nodes)}", *map(_sentence, short[:_LISTED])]
    if len(short) > _LISTED:
        given.append(f"{len(short) - _LISTED} more cannot take it")
    return ", ".join([*given, *(f"{count} {what}" for count, what in counts if count)])


def listed_shortages(view: DeploymentView) -> str:
    """Returns why nodes do not serve a deployment, or lack it; empty: there is nothing to say."""
    listed = [_sentence(each) for each in view.shortages[:_LISTED]]
    rest = len(view.shortages) - len(listed)
    return ", ".join([*listed, f"and {rest} more"] if rest else listed)


def _sentence(shortage: Shortage) -> str:
    if shortage.missing_bytes:
        return f"{shortage.node_id} lacks {binary_bytes(shortage.missing_bytes)}"
    return f"{shortage.node_id}: {shortage.reason or 'it does not say why'}"


def _taken(look: Assignments, model: str) -> set[str]:
    """Returns the older nodes that serve other deployments; only one model fits on such a node."""
    return {
        node_id
        for view in look.deployments.values()
        if view.deployment.model != model
        for node_id in view.assigned
        if node_id not in look.nodes or not look.nodes[node_id].plural
    }
