"""The models of a node. Each has its own agent, so that a fault of one does not affect the others.

An agent has ranks, links to routers, load and state. A router opens one stream per model. The first
agent is always there, with or without a model; the others come and go with their models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import structlog

from ryzanstein import errors
from ryzanstein.cluster import MODEL_CHANGES
from ryzanstein.process.background import STOP, Background
from ryzanstein.worker.agent.node import Health, NodeAgent
from ryzanstein.worker.agent.operations import Operations

log = structlog.get_logger(__name__)

NewAgent = Callable[[str, int], NodeAgent]
"""Takes a model's name, empty for the first agent, and the agent's place from 0."""


@dataclass(eq=False, slots=True)
class ModelAgent:
    """An agent with its operations. `place`: which of the node's cores and devices its ranks use."""

    node: NodeAgent
    operations: Operations
    place: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self) -> None:
        """Stops its beats, and what registers its adapters."""
        for task in self.tasks:
            task.cancel()


class NodeModels:
    """The agents of a node: the first one, and the others by the names of their models.

    `gone` is called with the name of an agent that has been removed.
    """

    def __init__(self, new_agent: NewAgent, background: Background, gone: Callable[[str], None] = lambda _: None) -> None:
        self._new_agent, self._background, self._gone = new_agent, background, gone
        self._health: NodeHealth | None = None
        self.first = self._make("", 0)
        self._others: dict[str, ModelAgent] = {}

    def __iter__(self) -> Iterator[ModelAgent]:
        yield self.first
        yield from self._others.values()

    @property
    def num_others(self) -> int:
        return len(self._others)

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

    def add(self, model: str) -> ModelAgent:
        """Adds an agent for a further model. Routers learn of it with the first agent's next beat."""
        taken = {agent.place for agent in self}
        agent = self._others[model] = self._make(model, next(place for place in count() if place not in taken))
        agent.node.drains |= self.first.node.drains - {MODEL_CHANGES}
        self._beat(agent)
        self._list()
        return agent

    async def remove(self, model: str) -> None:
        """Removes the agent of a further model that has been unloaded. Its links end."""
        agent = self._others.pop(model)
        self._list()
        agent.node.links.end()
        agent.stop()
        if self._health is not None:
            await self._health.forget(agent.node.settings.node_id)
        self._gone(model)

    def start(self, health: NodeHealth) -> None:
        """Starts the beats of all agents, and of those that are added later."""
        self._health = health
        for agent in self:
            self._beat(agent)

    def stop(self) -> None:
        """Stops the beats of all agents."""
        for agent in self:
            agent.stop()

    async def unload(self) -> None:
        """Unloads all models; returns when no rank is left."""
        await asyncio.gather(*(agent.node.versions.unload() for agent in self))

    async def drain(self, grace_s: float, *reason: str) -> int:
        """Drains all agents at once, see `Operations.drain`; returns how many generations remain."""
        return sum(await asyncio.gather(*(each.operations.drain(grace_s, *reason) for each in self)))

    def undrain(self) -> None:
        for each in self:
            each.operations.undrain()

    def end_links(self) -> None:
        for each in self:
            each.node.links.end()

    def _make(self, model: str, place: int) -> ModelAgent:
        node = self._new_agent(model, place)
        return ModelAgent(node, Operations(node), place)

    def _beat(self, agent: ModelAgent) -> None:
        if self._health is not None:
            run = partial(agent.node.run, self._health.of(agent.node.settings.node_id))
            beats = self._background.supervise("beats", run, STOP)
            agent.tasks = [beats, self._background.supervise("adapters", agent.node.adapters.run)]

    def _list(self) -> None:
        self.first.node.other_models = tuple(self._others)
        self.first.node.changed()


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

    async def forget(self, name: str) -> None:
        """Forgets an agent that is no longer there."""
        self._ready.pop(name, None)
        await self._health.set_ready(any(self._ready.values()))

    async def set_started(self) -> None:
        await self._health.set_started()

    async def set_engine(self, sound: bool) -> None:
        await self._health.set_engine(sound)


class _ModelHealth:
    """The readiness of one model."""

    def __init__(self, node: NodeHealth, name: str) -> None:
        self._node, self._name = node, name

    async def set_ready(self, ready: bool) -> None:
        await self._node.set_ready(self._name, ready)

    async def set_started(self) -> None:
        await self._node.set_started()

    async def set_engine(self, sound: bool) -> None:
        await self._node.set_engine(sound)
