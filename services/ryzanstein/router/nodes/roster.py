"""What a router asks of its nodes: which are linked, healthy and usable; and sends attempts to them.

All answers are this router's own knowledge, at this moment. It opens and closes no link.
What a generation does with an attempt once it is sent is here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType

from ryzanstein.cluster import NodeState, TokenOrigin
from ryzanstein.generation.request import NO_DEFAULTS, AdapterRef, Attempt, GenerationRequest, NodePlace, SamplingDefaults
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.choose import Affinity, Chooser, NodeView, Ranking
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.nodes.links.frames import AttemptSink
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.report import LinkLoss, LinkReport
from ryzanstein.router.nodes.table import ANY_MODEL, NodeTable, ServedModel

_MAX_TENANTS = 4096  # pairs of tenant and priority whose newest begun attempt a link remembers


@dataclass(frozen=True, slots=True)
class AttemptPlacement:
    """An attempt on a node."""

    link: NodeLink
    node_id: str
    handle: int
    tenant: str
    priority: int

    @property
    def overtaken(self) -> bool:
        """Whether an attempt that was sent to the node later has already produced output.

        Both have the same tenant and priority, so fairness between tenants and priority do not
        explain it.
        """
        return self.link.newest_begun.get((self.tenant, self.priority), 0) > self.handle

    def began(self) -> None:
        """Records that the attempt has produced output."""
        newest, key = self.link.newest_begun, (self.tenant, self.priority)
        if len(newest) >= _MAX_TENANTS and key not in newest:
            newest.clear()  # for a moment no attempt counts as overtaken
        newest[key] = max(newest.get(key, 0), self.handle)

    def cancel(self) -> None:
        self.link.cancel(self.handle)

    def release(self) -> None:
        self.link.release(self.handle)


class Roster:
    """The nodes of a router, for those who choose among them, use them or show them."""

    def __init__(self, router_id: str, table: NodeTable, chooser: Chooser, awake: AwakeClock) -> None:
        self.router_id = router_id
        self.awake = awake
        self._table = table
        self._chooser = chooser

    def snapshot(self) -> list[NodeView]:
        """Returns the linked nodes at this moment."""
        return [self._table.view(node_id) for node_id, link in self._table.nodes.items() if link.connected]

    def reports(self) -> list[LinkReport]:
        """Returns a report of every link at this moment, by node id, for operators."""
        links = sorted(self._table.links, key=lambda link: (link.node_id, link.address))
        return [self._report(link) for link in links]

    def _report(self, link: NodeLink) -> LinkReport:
        breaker = self._table.breakers.get(link.node_id)
        return LinkReport(
            link.node_id,
            link.address,
            link.connected,
            link.suspicion,
            BreakerState.CLOSED if breaker is None else breaker.state,
            link.inflight,
            link.beat.state,
            link.beat.reason,
            link.clock_skew_s,
            link.failure,
            link.engine,
            link.beat.reserve,
        )

    @property
    def recent_losses(self) -> tuple[LinkLoss, ...]:
        """Recent link losses, oldest first."""
        return self._table.losses.all

    @property
    def members(self) -> Mapping[str, str]:
        """Maps node ids to addresses, for the nodes that are linked now."""
        return {node_id: link.address for node_id, link in self._table.nodes.items() if link.connected}

    @property
    def models(self) -> list[ServedModel]:
        """The models that ready nodes serve, by name. The context is the shortest of the nodes'."""
        ready = sorted(self._table.index.ready.items())
        return [ServedModel(name, min(nodes.contexts), nodes.num_nodes, self.sampling_defaults(name)) for name, nodes in ready]

    def sampling_defaults(self, model: str) -> SamplingDefaults:
        """Returns the values that the model has of its own for parameters that a request leaves out.

        Where nodes differ, the first by name that is linked counts, so that routers agree; what was
        last known counts while none is. What one of the model's engines does not support is left out: else
        all requests that say nothing would be refused, or go past that engine.
        """
        first = self._table.index.first(model)
        if first is None:
            return NO_DEFAULTS
        return self._table.nodes[first].beat.sampling_defaults.without(self._table.index.lacking(model))

    @property
    def known_models(self) -> frozenset[str]:
        """The models of all nodes that were ever linked and have not departed, ready or not.

        Also those that the orchestrator lists.
        """
        return self._table.listed_models.union(self._table.index.known_models)

    def knows(self, model: str) -> bool:
        """Returns whether a node has the model, or had it lately and disappeared with it."""
        table = self._table
        return model in table.index.known_models or model in table.listed_models or model in table.departed_models

    async def changed(self, timeout_s: float, model: str = ANY_MODEL) -> None:
        """Returns when a node of the model came, went or changed, or after `timeout_s`."""
        await self._table.changed(timeout_s, model)

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        """Returns what the request stays near."""
        return self._chooser.affinity_of(request)

    def rank(self, model: str, affinity: Affinity, excluded: Collection[str]) -> Ranking:
        """Returns the nodes that could take the attempt, best first.

        A member without a link is ranked too, because a key still belongs to it.
        """
        return self._chooser.rank(self._table.members(model), model, affinity, excluded)

    def place(self, ranking: Ranking, node_id: str) -> None:
        """Records that the node is given an attempt now."""
        self._chooser.place(ranking, node_id)

    def could_serve(self, model: str, excluded: Collection[str]) -> bool:
        """Returns whether some node could take an attempt sooner or later.

        Such a node serves the model, and nothing is known against it except that it is full or that
        another request is probing it. Places nothing.
        """
        nodes, reserve = self._table.members(model).divided
        wanted = (node_id for node_id in chain(nodes.wanted, reserve.wanted) if node_id not in excluded)
        return any(self._table.breakers[node_id].state is not BreakerState.OPEN for node_id in wanted)

    def lacking(self, features: frozenset[str], used: frozenset[str] = frozenset()) -> frozenset[str]:
        """Returns the nodes that would ignore one of a request's features, or whose engines do not support what it uses."""
        abilities = self._table.index.abilities
        unable = [each for each in abilities if not (features <= each[0] and used.isdisjoint(each[1]))]
        return frozenset().union(*(abilities[each] for each in unable)) if unable else frozenset()

    def without_adapter(self, adapter: AdapterRef | None) -> frozenset[str]:
        """Returns the nodes that do not have an adapter with this content; none where a request has no adapter."""
        if adapter is None:
            return frozenset()
        found = self._table.adapters.lacking.get(adapter.digest)
        if found is None:
            nodes = self._table.nodes.items()
            found = frozenset(node_id for node_id, link in nodes if not link.adapters.has(adapter.digest))
            self._table.adapters.lacking[adapter.digest] = found
        return found

    def adapter(self, name: str) -> tuple[str, AdapterRef] | None:
        """Returns the model of an adapter and what it is now; None: no node has one of this name, or lately had.

        While nodes change from one content to another, the newer one counts as soon as a node has it.
        """
        if name in self._table.adapters.newest:
            return self._table.adapters.newest[name]
        links = [link for link in self._table.nodes.values() if link.known_model and name in link.adapters.by_name]
        found = [(link.adapters.by_name[name], link.connected, link.known_model) for link in links]
        if not found:
            return None
        newest, _, model = max(found, key=lambda each: (each[1], each[0].revision, each[0].ref.digest))
        self._table.adapters.newest[name] = model, newest.ref
        return model, newest.ref

    @property
    def adapters(self) -> list[ServedModel]:
        """The adapters that ready nodes have, by name."""
        served = {model.name: model for model in self.models}
        num_nodes = Counter[tuple[str, str]]()
        for link in self._table.nodes.values():
            if link.connected and link.beat.state is NodeState.READY and link.beat.model in served:
                num_nodes.update((each.ref.name, link.beat.model) for each in link.adapters)
        return [
            replace(served[model], name=name, ready_nodes=num, parent=model)
            for (name, model), num in sorted(num_nodes.items())
            if name not in served
        ]

    def unsupported(self, model: str) -> dict[str, str]:
        """Returns what engines of the model's nodes do not support, each with the name of such an engine."""
        lacking: dict[str, str] = {}
        for node_id in sorted(self.contexts(model)):
            lacking |= self._table.nodes[node_id].engine.lacking
        return lacking

    def origin_of(self, node_id: str) -> TokenOrigin:
        """Returns what decides whether others go on with the node's tokens, or did when it was last ready."""
        link = self._table.nodes.get(node_id)
        return TokenOrigin() if link is None else link.origin

    def incompatible(self, origin: TokenOrigin) -> frozenset[str]:
        """Returns the nodes that are known to go on with an answer otherwise than as it began."""
        origins = self._table.index.origins
        return frozenset().union(*(origins[each] for each in origins if each.incompatible(origin)))

    def drained(self, model: str) -> tuple[str, ...]:
        """Returns the nodes of the model when all of them drain until an operator takes that back.

        Empty when any other node may help: every link must be up and lead to one of these nodes or
        to a node that serves another model.
        """
        return self._table.phases.drained(model)

    def contexts(self, model: str) -> Mapping[str, int]:
        """Returns the contexts of the nodes that serve the model, or did before they went away.

        Nodes that have failed to serve it are left out.
        """
        return self._table.index.contexts(model)

    def starting(self, model: str, excluded: Collection[str]) -> bool:
        """Returns whether a node is starting that may serve the model with a context yet unknown."""
        starting, nodes = self._table.index.starting, self._table.nodes
        node_ids = (node_id for node_id in (*starting[""], *starting[model]) if node_id not in excluded)
        return any(not nodes[node_id].context_of(model) for node_id in node_ids)

    def least_loaded(
        self, model: str, excluded: Collection[str] = (), excluding: Mapping[str, int] = MappingProxyType({})
    ) -> NodeLink | None:
        """Returns the least loaded node, for a request that leaves no state; a reserve node only if there is no other.

        `excluding`: what nodes were sent beside their streams. None: no other node serves the model.
        """
        for nodes in self._table.members(model).divided:
            if takers := nodes.able_but(excluded):
                least = min(takers, key=lambda node_id: nodes.sequences[node_id] + excluding.get(node_id, 0))
                return self._table.nodes[least]
        return None

    def place_of(self, node_id: str) -> NodePlace | None:
        """Returns where a node is reached; None when it is not linked."""
        link = self._table.nodes.get(node_id)
        return NodePlace(node_id, link.address) if link is not None and link.connected else None

    def punctual(self, node_id: str) -> bool:
        """Returns whether the node's last sign of life is no older than usual."""
        link = self._table.nodes.get(node_id)
        return link is not None and link.punctual

    def breaker(self, node_id: str) -> Breaker | None:
        """Returns the node's breaker; None when the node is gone for good."""
        return self._table.breakers.get(node_id)

    def start(self, node_id: str, attempt: Attempt, sink: AttemptSink) -> AttemptPlacement:
        """Sends an attempt to a node of the last snapshot."""
        link = self._table.nodes[node_id]
        self._table.breakers[node_id].sent()
        handle = link.submit(attempt, sink)
        return AttemptPlacement(link, node_id, handle, attempt.request.tenant, attempt.request.priority)
