"""Which node serves which deployment: a pure function of what is desired and what nodes report.

A node serves one model. The rules, in this order: a node that serves a deployment keeps it; a deployment that lacks replicas
takes nodes that no deployment needs, by rendezvous hash (Thaler and Ravishankar, 1998), so that the answer is the same whatever
the order of the nodes and moves little when one comes or goes; what is left serves the deployments that want every node. A new
deployment therefore never takes a node away from one that states a number of replicas; it stays short instead.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from ryzanstein.cluster import Deployment, Node, NodeState


def place(deployments: Sequence[Deployment], nodes: Iterable[Node]) -> Mapping[str, Deployment]:
    """Node id to deployment; nodes that should drain, and nodes that no deployment needs, are absent."""
    free = {node.node_id: node for node in nodes if not node.drain_requested}
    counted = sorted((d for d in deployments if d.replicas), key=lambda d: d.model)
    everywhere = sorted((d for d in deployments if not d.replicas), key=lambda d: d.model)
    placed = _keep(counted, free)
    missing = {d.model: d.replicas - sum(p is d for p in placed.values()) for d in counted}
    for deployment in counted:
        if missing[deployment.model] and free:
            _take(deployment, missing[deployment.model], missing.keys(), free, placed)
    placed.update(_share(everywhere, free.values()))
    return placed


def _keep(counted: Sequence[Deployment], free: dict[str, Node]) -> dict[str, Deployment]:
    """Nodes that serve a deployment already, at most as many as it wants."""
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
    missing: int,
    desired: Iterable[str],
    free: dict[str, Node],
    placed: dict[str, Deployment],
) -> None:
    """Idle nodes first, then those that serve another desired model, last those that just failed to serve this one."""
    models = frozenset(desired) - {deployment.model}
    order = _order(deployment)
    chosen = heapq.nsmallest(missing, free.values(), key=lambda n: (n.model == deployment.model, n.model in models, order(n)))
    for node in chosen:
        placed[node.node_id] = deployment
        del free[node.node_id]


def _share(everywhere: Sequence[Deployment], nodes: Iterable[Node]) -> dict[str, Deployment]:
    """Splits nodes among deployments that each want every node: a node keeps what it serves, else the hash decides."""
    if not everywhere:
        return {}
    by_model = {deployment.model: deployment for deployment in everywhere}
    return {
        node.node_id: by_model.get(node.model) or min(everywhere, key=lambda d: _hash(d.model, node.node_id)) for node in nodes
    }


def _order(deployment: Deployment) -> Callable[[Node], bytes]:
    """The key by which a deployment prefers nodes."""
    return lambda node: _hash(deployment.model, node.node_id)


def _hash(model: str, node_id: str) -> bytes:
    return blake2b(f"{node_id}\0{model}".encode(), digest_size=8).digest()
