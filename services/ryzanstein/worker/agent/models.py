"""The models of a node. Each has its own agent, so that a fault of one does not affect the others.

An agent has ranks, links to routers, load and state. A router opens one stream per model. The first
model is the one that the orchestrator replaces; the others are those that the node was started
with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.cluster import Beat, Deployment, Node
from ryzanstein.worker.agent.node import Health, NodeAgent
from ryzanstein.worker.agent.operations import Operations


@dataclass(frozen=True, slots=True)
class ModelAgent:
    """An agent with its operations."""

    node: NodeAgent
    operations: Operations


class NodeModels:
    """The agents of a node: the first one, and the others by the names of their models."""

    def __init__(self, first: ModelAgent, others: Mapping[str, ModelAgent]) -> None:
        self.first = first
        self._others = others

    def __iter__(self) -> Iterator[ModelAgent]:
        yield self.first
        yield from self._others.values()

    def of(self, model: str) -> ModelAgent:
        """Returns the agent of the model; the first one also for names that no other agent has."""
        return self._others.get(model, self.first)

    def linked(self, model: str) -> ModelAgent:
        """Returns the agent that a stream of a router is for. Empty: the first one.

        Raises UNAVAILABLE for a model that the node does not list in its beats.
        """
        if model and model not in self._others:
            text = f"node {self.first.node.settings.node_id} has no stream for model {model[:128]!r}"
            raise errors.unavailable("MODEL_NOT_SERVED", text)
        return self.of(model)

    async def drain(self, grace_s: float, *reason: str) -> int:
        """Drains all agents at once, see `Operations.drain`; returns how many generations remain."""
        return sum(await asyncio.gather(*(each.operations.drain(grace_s, *reason) for each in self)))

    def undrain(self) -> None:
        for each in self:
            each.operations.undrain()

    def describe(self) -> Node:
        """Returns the node's description as a member of its cluster: that of the first model."""
        return self.first.operations.describe()

    def beat(self) -> Beat:
        return self.first.operations.beat()

    def desire(self, deployment: Deployment | None, *, drain: bool) -> None:
        """Follows the orchestrator: it deploys to the first agent, and drains all."""
        self.first.operations.desire(deployment, drain=drain)
        for each in self._others.values():
            each.operations.desire(None, drain=drain)

    def end_links(self) -> None:
        for each in self:
            each.node.end_links()


class NodeHealth:
    """The readiness of a node: it is ready when one of its models is."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._ready: dict[str, bool] = {}

    def of(self, name: str) -> Health:
        """Returns where the agent of this name reports its readiness."""
        return _ModelHealth(self, name)

    async def set_ready(self, name: str, ready: bool) -> None:
        self._ready[name] = ready
        await self._health.set_ready(any(self._ready.values()))

    async def set_started(self) -> None:
        await self._health.set_started()


class _ModelHealth:
    """The readiness of one model."""

    def __init__(self, node: NodeHealth, name: str) -> None:
        self._node, self._name = node, name

    async def set_ready(self, ready: bool) -> None:
        await self._node.set_ready(self._name, ready)

    async def set_started(self) -> None:
        await self._node.set_started()
