"""What a router knows of its nodes at first hand. `Linker` alone changes it, `Roster` answers from it.

A model whose last node has disappeared stays known for a while. The node may be cut off from the orchestrator, or
restarting: a request for the model is not the client's mistake. It waits, and may be sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from ryzanstein.cluster import NodeState
from ryzanstein.generation.request import NO_DEFAULTS, AdapterRef, SamplingDefaults
from ryzanstein.router.choose import Members, NodeView, OrderMemory
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.nodes.index import LinkPhases, NodeIndex
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.report import RecentLosses


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one ready node serves; `context_length` in tokens.

    `sampling_defaults` are its own values of parameters. `parent`: it is an adapter of this model.
    """

    name: str
    context_length: int
    ready_nodes: int
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    parent: str = ""


ANY_MODEL = ""
_KEEP_S = 3600.0


class DepartedModels:
    """The names, each for `keep_s` seconds since it was last added. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float], keep_s: float = _KEEP_S) -> None:
        self._now = now
        self._keep_s = keep_s
        self._until: dict[str, float] = {}

    def add(self, model: str) -> None:
        now = self._now()
        self._until = {name: until for name, until in self._until.items() if until > now}
        self._until[model] = now + self._keep_s

    def __contains__(self, model: str) -> bool:
        return self._until.get(model, 0.0) > self._now()


def _departed_models() -> DepartedModels:
    return DepartedModels(time.monotonic)


@dataclass(slots=True)
class AdapterAnswers:
    """What was found of adapters since a link last changed: the newest of a name with its model, and who lacks a content."""

    newest: dict[str, tuple[str, AdapterRef]] = field(default_factory=dict)
    lacking: dict[bytes, frozenset[str]] = field(default_factory=dict)

    def clear(self) -> None:
        self.newest.clear()
        self.lacking.clear()


@dataclass(slots=True)
class NodeTable:
    """The links of a router, and its nodes by their ids.

    `links` are all open links with the tasks that run them, also of addresses that never answered
    and of nodes that left the membership. `nodes` has the link of each node that ever answered and
    has not left, connected or not; `breakers` has the same keys. `draining` are node ids, and
    `listed_models` names, as the orchestrator knows them.
    """

    links: dict[NodeLink, asyncio.Task[None]] = field(default_factory=dict)
    nodes: dict[str, NodeLink] = field(default_factory=dict)
    breakers: dict[str, Breaker] = field(default_factory=dict)
    draining: frozenset[str] = frozenset()
    listed_models: frozenset[str] = frozenset()
    departed_models: DepartedModels = field(default_factory=_departed_models)
    losses: RecentLosses = field(default_factory=RecentLosses)
    index: NodeIndex = field(default_factory=NodeIndex)
    phases: LinkPhases = field(default_factory=LinkPhases)
    adapters: AdapterAnswers = field(default_factory=AdapterAnswers)
    _members: dict[str, Members] = field(default_factory=dict)
    _views: dict[str, NodeView] = field(default_factory=dict)
    _tripped: set[str] = field(default_factory=set)
    """The nodes whose breakers are not closed."""
    _stale: set[str] = field(default_factory=set)
    """Nodes whose number of attempts of this router has changed since the last choice."""
    _memory: OrderMemory = field(default_factory=OrderMemory)
    _waiting: dict[str, asyncio.Event] = field(default_factory=dict)

    def view(self, node_id: str) -> NodeView:
        """Returns a node at this moment."""
        link = self.nodes[node_id]
        return NodeView(
            node_id,
            link.beat.model,
            link.beat.state,
            link.beat.load,
            link.inflight,
            self.breakers[node_id].admits,
            link.suspected,
            node_id in self.draining,
            link.connected,
            link.beat.reserve,
        )

    def renew(self, node_id: str) -> Set[str]:
        """Takes what changed of a node, and looks at no other. Returns the models for which more than its load is new."""
        self.reload(node_id)
        self.adapters.clear()
        link = self.nodes.get(node_id)
        return self.index.remove(node_id) if link is None else self.index.put(node_id, link)

    def reload(self, node_id: str) -> None:
        """Brings the choice up to date with a node."""
        self._stale.discard(node_id)
        before, view = self._views.get(node_id), self.view(node_id) if node_id in self.nodes else None
        if view is None or self.breakers[node_id].state is BreakerState.CLOSED:
            self._tripped.discard(node_id)
        else:
            self._tripped.add(node_id)
        if view == before:  # as after most beats of a node without work
            return
        if before is not None and (view is None or view.model != before.model):
            self._leave(before)
            del self._views[node_id]
        if view is not None:
            self._views[node_id] = view
            self._join(view)

    def took(self, node_id: str) -> None:
        """Notes that a node got or ended attempts of this router. The next choice counts them."""
        self._stale.add(node_id)

    def _join(self, view: NodeView) -> None:
        if view.model not in self._members:
            self._members[view.model] = Members(self._memory)
        self._members[view.model].put(view)

    def _leave(self, view: NodeView) -> None:
        members = self._members[view.model]
        members.remove(view.node_id)
        if not members:
            del self._members[view.model]

    def members(self, model: str) -> Members:
        """Returns the nodes of a model at this moment, for the choice among them."""
        while self._stale:
            self.reload(self._stale.pop())
        # The end of a breaker's pause is no event.
        for node_id in [each for each in self._tripped if self.breakers[each].admits is not self._views[each].admits]:
            self.reload(node_id)
        return self._members.get(model) or Members(self._memory)

    def settle(self, link: NodeLink) -> None:
        """Takes whether a link is open, up and drained."""
        wanted = link.node_id in self.draining and link.beat.state is NodeState.READY
        self.phases.put(link, drained=wanted or link.beat.drained, is_open=link in self.links)

    def notify(self, models: Iterable[str]) -> None:
        """Wakes all who wait for a change of one of these models, or of any."""
        for model in (*models, ANY_MODEL):
            event = self._waiting.pop(model, None)
            if event is not None:
                event.set()

    async def changed(self, timeout_s: float, model: str = ANY_MODEL) -> None:
        """Returns when a node of the model came, went or changed, or after `timeout_s`."""
        event = self._waiting.setdefault(model, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return
