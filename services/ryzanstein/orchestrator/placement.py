"""Decides which node serves which deployment: a pure function of desired state and node reports.

A node serves one model. The rules apply in this order:

1. A node that serves a deployment keeps it.
2. A deployment that lacks replicas takes nodes that no deployment needs, by rendezvous hash (Thaler
   and Ravishankar, 1998). The result does not depend on the order of the nodes, and changes little
   when a node comes or goes.
3. The remaining nodes serve the deployments that want every node.

A new deployment therefore never takes a node from one that states a number of replicas; it stays
short instead.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from ryzanstein.cluster import Deployment, Node, NodeState

Failed = Collection[tuple[str, str]]
"""Node ids and models: which nodes lately failed to serve which model, see `refusals`."""


def place(deployments: Sequence[Deployment], nodes: Iterable[Node], failed: Failed = ()) -> Mapping[str, Deployment]:
    """Maps node ids to deployments.

    Nodes that should drain, and nodes that no deployment needs, are absent.
    """
    free = {node.node_id: node for node in nodes if not node.drain_requested}
    counted = sorted((d for d in deployments if d.replicas), key=lambda d: d.model)
    everywhere = sorted((d for d in deployments if not d.replicas), key=lambda d: d.model)
    placed = _keep(counted, free)
    missing = {d.model: d.replicas - sum(p is d for p in placed.values()) for d in counted}
    for deployment in counted:
        if missing[deployment.model] and free:
            _take(deployment, missing, free, placed, failed)
    placed.update(_share(everywhere, free.values()))
    return placed


def _keep(counted: Sequence[Deployment], free: dict[str, Node]) -> dict[str, Deployment]:
    """Returns the nodes that already serve a deployment, at most as many as it wants."""
    serving: dict[str, list[Node]] = defaultdict(list)
    for node in free.values():
        if node.state != NodeState.FAILED:
            serving[node.model].append(node)
    placed: dict[str, Deployment] = {}
    for deployment in counted:
        for node in heapq.nsmallest(deployment.replicas, serving[deployment.model], key=_order(deployment)):
            placed[node.node_id] = deployment
            del free[node.node_id]
    return placed


def _take(
    deployment: Deployment,
    missing: Mapping[str, int],
    free: dict[str, Node],
    placed: dict[str, Deployment],
    failed: Failed,
) -> None:
    """Takes idle nodes first, then nodes that serve another desired model.

    Last come nodes that failed to serve this model: first those that still have it, so that a model
    that fails everywhere stays where it failed last.
    """
    model, order = deployment.model, _order(deployment)

    def preference(node: Node) -> tuple[bool, bool, bool, bytes]:
        fails = node.state is NodeState.FAILED and node.model in ("", model)
        has_failed = node.model == model or (node.node_id, model) in failed
        return has_failed, has_failed and not fails, node.model in missing and node.model != model, order(node)

    for node in heapq.nsmallest(missing[model], free.values(), key=preference):
        placed[node.node_id] = deployment
        del free[node.node_id]


def _share(everywhere: Sequence[Deployment], nodes: Iterable[Node]) -> dict[str, Deployment]:
    """Splits nodes among the deployments that each want every node.

    A node keeps what it serves; otherwise the hash decides.
    """
    if not everywhere:
        return {}
    by_model = {deployment.model: deployment for deployment in everywhere}
    return {
        node.node_id: by_model.get(node.model) or min(everywhere, key=lambda d: _hash(d.model, node.node_id)) for node in nodes
    }


def _order(deployment: Deployment) -> Callable[[Node], bytes]:
    """Returns the key by which a deployment prefers nodes."""
    return lambda node: _hash(deployment.model, node.node_id)


def _hash(model: str, node_id: str) -> bytes:
    return blake2b(f"{node_id}\0{model}".encode(), digest_size=8).digest()
