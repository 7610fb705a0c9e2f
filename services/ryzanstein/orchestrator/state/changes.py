"""What can change in a cluster: the registry and the catalog publish it, and watchers replay it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.cluster import Deployment, Node


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node joined or reported something new.

    `load_only`: nothing changed but its loads, the memory that its models use, and the time of its
    beat.
    """

    node: Node
    load_only: bool = False


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """A node left, or its lease expired."""

    node_id: str


@dataclass(frozen=True, slots=True)
class DeploymentChanged:
    """A deployment is new or different."""

    deployment: Deployment


@dataclass(frozen=True, slots=True)
class DeploymentRemoved:
    """A deployment was removed."""

    model: str


Change = NodeChanged | NodeLeft | DeploymentChanged | DeploymentRemoved
Publish = Callable[[Change], None]
