"""What can change in a cluster: the values that the registry and the catalog publish and that watchers replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Node


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node joined or says something new. `load_only`: nothing but its load and the time of its beat."""

    node: Node
    load_only: bool = False


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node left, or its lease ran out."""

    node_id: str


@dataclass(frozen=True, slots=True)
class DeploymentChanged:
    """A deployment is new or different."""

    deployment: Deployment


@dataclass(frozen=True, slots=True)
class DeploymentRemoved:
    """A deployment was withdrawn."""

    model: str


Change = NodeChanged | NodeLeft | DeploymentChanged | DeploymentRemoved
Publish = Callable[[Change], None]
