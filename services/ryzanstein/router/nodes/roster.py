"""All links, and this router's first-hand knowledge: which nodes are linked, healthy and usable.

Membership decides which nodes to link; the links show which are alive. A node that left the
membership keeps its links until they have all ended, so a lease that an orchestrator's restart lost
breaks nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from ryzanstein.awake import AwakeClock
from ryzanstein.cluster import NO_MODEL, Beat, NodeState, Numerics
from ryzanstein.generation import MAX_NAME_CHARS, Attempt, GenerationRequest, NodePlace
from ryzanstein.router.choose import Affinity, Chooser, NodeView, Ranking, is_usable
from ryzanstein.router.nodes.breaker import Breaker, BreakerState
from ryzanstein.router.nodes.departed import DepartedModels
from ryzanstein.router.nodes.frames import AttemptSink
from ryzanstein.router.nodes.likeness import Likeness
from ryzanstein.router.nodes.link import CLOSED, NodeLink
from ryzanstein.router.nodes.phi_detector import PhiThresholds
from ryzanstein.router.nodes.report import LinkLoss, LinkReport, RecentLosses
from ryzanstein.router.nodes.served import ServedModel
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

MAX_FURTHER_MODELS = 31  # of one node
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
    """The links of a router. Call `follow` with the membership, and `close` at the end."""

    def __init__(
        self, router_id: str, thresholds: PhiThresholds, chooser: Chooser, telemetry: RouterTelemetry, awake: AwakeClock
    ) -> None:
        self.router_id = router_id
        self.awake = awake
        self._thresholds = thresholds
        self._chooser = chooser
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[NodeLink, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._nodes: dict[str, NodeLink] = {}
        self._breakers: dict[str, Breaker] = {}
        self._draining: frozenset[str] = frozenset()
        self._suspected: set[str] = set()
        self._listed_models: frozenset[str] = frozenset()
        self._departed_models = DepartedModels(time.monotonic)
        self._losses = RecentLosses()
        self._likeness = Likeness(telemetry.likeness)
        self._changed = asyncio.Event()

    def follow(self, addresses: Collection[str], draining: Collection[str] = (), models: Collection[str] = ()) -> None:
        """Links exactly these addresses. The links to another address end when none of them is up.

        `draining`: node ids. `models`: what the nodes serve, as the orchestrator knows it.
        """
        self._draining, self._listed_models = frozenset(draining), frozenset(models)
        known = {link.address: link for link in self._running() if not link.model}
        for address in sorted(addresses):
            link = known.pop(address, None)
            if link is None:
                self._open(address)
            else:
                link.departed = False
                self._follow_models(link)
        for link in known.values():
            self._depart(link)
            self._follow_models(link)
        self._notify()

    def _follow_models(self, first: NodeLink) -> None:
        """Opens and closes links so that each further model of this link's node has one.

        The links of a node that is down are kept.
        """
        if first.model or not (first.connected or first.departed):
            return
        known = {link.model: link for link in self._running() if link.model and link.address == first.address}
        for model in () if first.departed else _further_models(first.beat):
            link = known.pop(model, None)
            if link is None:
                self._open(first.address, model)
            else:
                link.departed = False
        for link in known.values():
            self._depart(link)

    def _running(self) -> list[NodeLink]:
        return [link for link, task in self._tasks.items() if not task.done()]

    def _depart(self, link: NodeLink) -> None:
        link.departed = True
        if not link.connected and not self.outlives(link):
            self._close(link)

    def _open(self, address: str, model: str = "") -> None:
        link = NodeLink(address, self.router_id, self._thresholds, self, self.awake, model=model)
        task = self._telemetry.background.supervise("link", link.run, finite=True)
        self._tasks[link] = task
        task.add_done_callback(lambda task: self._gone(link, task))

    def _close(self, link: NodeLink) -> None:
        """Starts to close a link. An address that returns before it is closed gets a new link."""
        task = self._tasks.pop(link)
        task.cancel()
        self._closing.add(task)

    def outlives(self, link: NodeLink) -> bool:
        """Returns whether the node of a departed link is up and still has the link's model.

        The orchestrator may have lost sight of a node that other links reach.
        """
        links = [other for other in self._tasks if other.address == link.address]
        listed = {model for first in links if not first.model for model in ("", *_further_models(first.beat))}
        return link.model in listed and any(other.connected for other in links)

    def _gone(self, link: NodeLink, task: asyncio.Task[None]) -> None:
        self._tasks.pop(link, None)
        self._closing.discard(task)
        if link.known_model and link.departed and not self._unlisted(link):
            self._departed_models.add(link.known_model)
        self._forget_names(link, but="")

    def _unlisted(self, link: NodeLink) -> bool:
        """Returns whether the link's node is still linked and no longer has its model."""
        firsts = [first for first in self._tasks if not first.model and first.address == link.address]
        return bool(link.model) and any(link.model not in _further_models(first.beat) for first in firsts)

    def _forget_names(self, link: NodeLink, but: str) -> None:
        """Forgets the node ids that this link no longer represents."""
        for node_id in [name for name, known in self._nodes.items() if known is link and name != but]:
            del self._nodes[node_id]
            del self._breakers[node_id]
            self._suspected.discard(node_id)
            self._telemetry.forget_node(node_id)

    async def close(self) -> None:
        for link in list(self._tasks):
            self._close(link)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def snapshot(self) -> list[NodeView]:
        """Returns the linked nodes at this moment."""
        return [self._view(link) for link in self._nodes.values() if link.connected]

    def _view(self, link: NodeLink) -> NodeView:
        return NodeView(
            link.node_id,
            link.beat.model,
            link.beat.state,
            link.beat.load,
            link.inflight,
            self._breakers[link.node_id].admits,
            link.suspected,
            link.node_id in self._draining,
            link.connected,
        )

    def reports(self) -> list[LinkReport]:
        """Returns a report of every link at this moment, by node id, for operators."""
        links = sorted(self._tasks, key=lambda link: (link.node_id, link.address))
        return [self._report(link) for link in links]

    def _report(self, link: NodeLink) -> LinkReport:
        breaker = self._breakers.get(link.node_id)
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
        )

    @property
    def recent_losses(self) -> tuple[LinkLoss, ...]:
        """Recent link losses, oldest first."""
        return self._losses.all

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        """Returns what the request stays near."""
        return self._chooser.affinity_of(request)

    def rank(self, model: str, affinity: Affinity, excluded: Collection[str]) -> Ranking:
        """Returns the nodes that could take the attempt, best first.

        A member without a link is ranked too, because a key still belongs to it.
        """
        return self._chooser.rank([self._view(link) for link in self._nodes.values()], model, affinity, excluded)

    def place(self, ranking: Ranking, node_id: str) -> None:
        """Records that the node is given an attempt now."""
        self._chooser.place(ranking, node_id)

    def could_serve(self, model: str, excluded: Collection[str]) -> bool:
        """Returns whether some node could take an attempt sooner or later.

        Such a node serves the model, and nothing is known against it except that it is full or that
        another request is probing it. Places nothing.
        """
        return any(link.node_id not in excluded for link in self._serving(model))

    def lacking(self, features: frozenset[str]) -> frozenset[str]:
        """Returns the nodes that would ignore a part of a request that needs these features."""
        if not features:
            return frozenset()
        return frozenset(node_id for node_id, link in self._nodes.items() if not features <= link.features)

    def numerics_of(self, node_id: str) -> Numerics:
        """Returns how the node computes, or did when it was last ready."""
        link = self._nodes.get(node_id)
        return Numerics() if link is None else link.numerics

    def alike(self, node_id: str, other: str) -> bool:
        """Returns whether nothing is known by which two nodes compute other tokens."""
        return not self.numerics_of(node_id).differs(self.numerics_of(other))

    def unlike(self, numerics: Numerics) -> frozenset[str]:
        """Returns the nodes that are known to compute other tokens."""
        if not numerics.known:
            return frozenset()
        return frozenset(node_id for node_id, link in self._nodes.items() if link.numerics.differs(numerics))

    def drained(self, model: str) -> tuple[str, ...]:
        """Returns the nodes of the model when all of them drain until an operator takes that back.

        Empty when any other node may help: every link must be up and lead to one of these nodes or
        to a node that serves another model.
        """
        others = [link for link in self._tasks if not self._drained(link)]
        if not all(link.connected and link.beat.state is NodeState.READY and link.beat.model != model for link in others):
            return ()
        return tuple(sorted(link.node_id for link in self._tasks if link not in others and link.beat.model == model))

    def _drained(self, link: NodeLink) -> bool:
        wanted = link.node_id in self._draining and link.beat.state is NodeState.READY
        return link.connected and (wanted or link.beat.drained)

    def contexts(self, model: str) -> dict[str, int]:
        """Returns the contexts of the nodes that serve the model, or did before they went away.

        Nodes that have failed to serve it are left out.
        """
        links = ((node_id, link) for node_id, link in self._nodes.items() if not link.departed)
        known = {node_id: link.context_of(model) for node_id, link in links if link.beat.state is not NodeState.FAILED}
        return {node_id: context for node_id, context in known.items() if context}

    def starting(self, model: str, excluded: Collection[str]) -> bool:
        """Returns whether a node is starting that may serve the model with a context yet unknown."""
        links = (link for node_id, link in self._nodes.items() if node_id not in excluded and not link.departed)
        return any(_starts(link, model) for link in links)

    def _serving(self, model: str) -> Iterator[NodeLink]:
        """Yields the links of nodes that serve the model. Their breakers may be half-open."""
        for node_id, link in self._nodes.items():
            ready = link.connected and link.beat.state is NodeState.READY and link.beat.model == model
            wanted = not link.suspected and node_id not in self._draining
            if ready and wanted and self._breakers[node_id].state is not BreakerState.OPEN:
                yield link

    def start(self, node_id: str, attempt: Attempt, sink: AttemptSink) -> AttemptPlacement:
        """Sends an attempt to a node of the last snapshot."""
        link = self._nodes[node_id]
        self._breakers[node_id].sent()
        handle = link.submit(attempt, sink)
        return AttemptPlacement(link, node_id, handle, attempt.request.tenant, attempt.request.priority)

    def place_of(self, node_id: str) -> NodePlace | None:
        """Returns where a node is reached; None when it is not linked."""
        link = self._nodes.get(node_id)
        return NodePlace(node_id, link.address) if link is not None and link.connected else None

    def punctual(self, node_id: str) -> bool:
        """Returns whether the node's last sign of life is no older than usual."""
        link = self._nodes.get(node_id)
        return link is not None and link.punctual

    def breaker(self, node_id: str) -> Breaker | None:
        """Returns the node's breaker; None when the node is gone for good."""
        return self._breakers.get(node_id)

    def least_loaded(
        self, model: str, excluded: Collection[str] = (), besides: Mapping[str, int] = MappingProxyType({})
    ) -> NodeLink | None:
        """Returns the least loaded node, for a request that leaves no state.

        `besides`: what nodes were sent beside their streams. None: no other node serves the model.
        """
        usable = [node for node in self.snapshot() if is_usable(node, model) and node.node_id not in excluded]
        if not usable:
            return None
        return self._nodes[min(usable, key=lambda node: node.sequences + besides.get(node.node_id, 0)).node_id]

    @property
    def models(self) -> list[ServedModel]:
        """The models that ready nodes serve, by name. The context is the shortest of the nodes'."""
        served: dict[str, ServedModel] = {}
        for link in self._nodes.values():
            if link.connected and link.beat.state is NodeState.READY and link.beat.model:
                before = served.get(link.beat.model, ServedModel(link.beat.model, link.beat.context_length, 0))
                shortest = min(before.context_length, link.beat.context_length)
                served[before.name] = ServedModel(before.name, shortest, before.ready_nodes + 1)
        return sorted(served.values(), key=lambda model: model.name)

    @property
    def known_models(self) -> frozenset[str]:
        """The models of all nodes that were ever linked and have not departed, ready or not.

        Also those that the orchestrator lists.
        """
        links = self._nodes.values()
        listed = (model for link in links for model in (link.known_model, *_further_models(link.beat)))
        return self._listed_models | frozenset(model for model in listed if model)

    def knows(self, model: str) -> bool:
        """Returns whether a node has the model, or had it lately and disappeared with it."""
        return model in self.known_models or model in self._departed_models

    @property
    def members(self) -> Mapping[str, str]:
        """Maps node ids to addresses, for the nodes that are linked now."""
        return {node_id: link.address for node_id, link in self._nodes.items() if link.connected}

    async def changed(self, timeout_s: float) -> None:
        """Returns when a node came, went or changed, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        self._likeness.judge(self._nodes.values())
        self._changed.set()
        self._changed = asyncio.Event()

    def link_up(self, link: NodeLink, restarted: bool) -> None:
        node_id = link.node_id
        self._forget_names(link, but=node_id)
        other = self._nodes.get(node_id)
        if other is not None and other is not link and other.connected:
            log.error("duplicate node id", node_id=node_id, addresses=[other.address, link.address])
        self._nodes[node_id] = link
        if node_id not in self._breakers:
            self._breakers[node_id] = Breaker(time.monotonic, lambda state: self._breaker_changed(node_id, state))
            self._telemetry.breaker.labels(node_id).set(BreakerState.CLOSED.value)
        if restarted:
            self._breakers[node_id].reset()
        self._telemetry.know_node(node_id)
        self._telemetry.link_up.labels(node_id).set(1)
        self._follow_models(link)
        self._notify()

    def link_down(self, link: NodeLink, cause: str) -> None:
        if cause != CLOSED:
            # After a pause of this router no node is blamed: meanwhile the node may have given up
            # this router, or gRPC the connection.
            if (breaker := self._breakers.get(link.node_id)) is not None and not self.awake.lately_paused:
                breaker.open()
            self._telemetry.link_losses.labels(link.node_id, cause).inc()
            self._losses.add(link.node_id, cause, link.inflight)
        self._trust(link)
        if self._nodes.get(link.node_id) is link:
            self._telemetry.link_up.labels(link.node_id).set(0)
        self._notify()

    def link_changed(self, link: NodeLink) -> None:
        if link.suspected:
            self._suspect(link)
        else:
            self._trust(link)
        self._follow_models(link)
        self._notify()

    def _suspect(self, link: NodeLink) -> None:
        self._suspected.add(link.node_id)
        self._telemetry.suspected.labels(link.node_id).set(1)

    def _trust(self, link: NodeLink) -> None:
        if link.node_id in self._suspected:
            self._suspected.discard(link.node_id)
            self._telemetry.suspected.labels(link.node_id).set(0)

    def link_beat(self, link: NodeLink) -> None:
        self._telemetry.beats.labels(link.node_id).inc()
        self._telemetry.clock_skew.labels(link.node_id).set(link.clock_skew_s)

    def link_suspected(self, link: NodeLink, cause: str) -> None:
        self._telemetry.suspicions.labels(link.node_id, cause).inc()

    def link_progressed(self, link: NodeLink, num_tokens: int) -> None:
        self._telemetry.tokens.labels(link.beat.model, link.node_id).inc(num_tokens)

    def _breaker_changed(self, node_id: str, state: BreakerState) -> None:
        self._telemetry.breaker.labels(node_id).set(state.value)
        self._notify()


def _further_models(beat: Beat) -> Sequence[str]:
    """Returns the valid names without duplicates, at most MAX_FURTHER_MODELS."""
    names = dict.fromkeys(name for name in beat.other_models if 0 < len(name) <= MAX_NAME_CHARS)
    return tuple(names)[:MAX_FURTHER_MODELS]


def _starts(link: NodeLink, model: str) -> bool:
    starts = link.connected and link.beat.state in (NodeState.STARTING, NodeState.RECOVERING) and link.beat.reason != NO_MODEL
    return starts and not link.context_of(model) and link.beat.model in ("", model)
