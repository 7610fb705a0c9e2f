"""Compares desired and reported state: computes the answer to a node's heartbeat.

The placement is computed once per burst of changes, not per beat. While the orchestrator settles
after a restart it has seen only some of the nodes. A placement over those would move models without
need, so each node is instructed to keep what it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Node, NodeState
from ryzanstein.orchestrator.catalog import Catalog
from ryzanstein.orchestrator.placement import place
from ryzanstein.orchestrator.refusals import Refusals
from ryzanstein.orchestrator.registry import Registry
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a node should do. Without a deployment it may continue to serve what it serves."""

    deployment: Deployment | None
    drain: bool


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """A deployment with the nodes chosen for it, and the nodes that report it ready."""

    deployment: Deployment
    assigned_nodes: tuple[str, ...]
    ready_nodes: tuple[str, ...]


class Reconciler:
    """Holds the placement that the last `update` computed."""

    def __init__(self, registry: Registry, catalog: Catalog, refusals: Refusals, telemetry: OrchestratorTelemetry) -> None:
        self._registry = registry
        self._catalog = catalog
        self._refusals = refusals
        self._telemetry = telemetry
        self._placed: Mapping[str, Deployment] = {}
        self._stale = True
        self._settled = False

    def invalidate(self) -> None:
        """Marks the placement as stale: something that it depends on changed."""
        self._stale = True

    def settle(self) -> None:
        """Starts to instruct nodes by the placement: the members are known."""
        self._settled = True

    def update(self) -> None:
        """Computes the placement if it is stale."""
        if self._stale:
            self._stale = False
            deployments, nodes = self._catalog.deployments(), self._registry.nodes()
            self._refusals.note(nodes, self._placed)
            self._placed = place(deployments, nodes, self._refusals.of(deployments, nodes))
            self._telemetry.placements.inc()

    def instruct(self, node: Node) -> Instruction:
        placed = self._placed.get(node.node_id) if self._settled else self._catalog.find(node.model)
        return Instruction(placed, node.drain_requested)

    def status(self) -> list[DeploymentStatus]:
        """Returns the current status of each deployment, by name."""
        self.update()
        assigned: dict[str, list[str]] = defaultdict(list)
        for node_id, deployment in self._placed.items():
            assigned[deployment.model].append(node_id)
        ready: dict[str, list[str]] = defaultdict(list)
        for node in self._registry.nodes():
            if node.state == NodeState.READY:
                ready[node.model].append(node.node_id)
        return [
            DeploymentStatus(d, tuple(sorted(assigned[d.model])), tuple(sorted(ready[d.model])))
            for d in self._catalog.deployments()
        ]
