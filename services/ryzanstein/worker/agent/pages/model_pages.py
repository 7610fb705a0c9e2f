"""The pages of one version of a model: which go where, and which come back before a prompt is computed.

It stands between the engine's events and the stores. Everything here is an optimization: whatever
fails, is late, damaged or foreign, is computed again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from ryzanstein import errors
from ryzanstein.generation.request import Attempt, NodePlace
from ryzanstein.worker.agent.pages.conversations import Chain, Conversations
from ryzanstein.worker.agent.pages.handing_over import hand_over
from ryzanstein.worker.agent.pages.mover import PageMover
from ryzanstein.worker.agent.pages.outbox import MAX_QUEUED, Outbox
from ryzanstein.worker.agent.pages.page import PageSizes, root_of
from ryzanstein.worker.agent.pages.restoring import LEAST_TOKENS, MOST_S, PageSource, PrefillPace, Restoring
from ryzanstein.worker.agent.pages.store import PageScope
from ryzanstein.worker.agent.pages.tiers.node_store import NodeStore
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.agent.pages.weights import LoadedWeights
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.memory.prefix import chain_keys, scope_root
from ryzanstein.worker.engine.messages import EngineStats, ReturnChoice, StepEvents
from ryzanstein.worker.supervision.group import EngineGroup
from ryzanstein.worker.supervision.messages import PagesAnswer, RankReady
from ryzanstein.worker.telemetry import WorkerTelemetry

log = structlog.get_logger(__name__)

_MAX_FLOWS = 4096
_MAX_NODES = 64
_KNOWN_S = 3.0  # that another node waits for the digest of the weights here
_KNOWN_LEAST_S = 0.5
_RETURN_S = 0.8  # less than a paused choice waits


@dataclass(slots=True)
class _Flow:
    """The pages of a group: whose they are by cache scope and tenant, where they go, and the last one that became full.

    `held` wait until the digest of the weights is known.
    """

    model: str
    cache_scope: str
    tenant: str
    outboxes: Sequence[Outbox]
    conversation: bytes
    place: NodePlace | None
    last: bytes = b""
    begun: bool = False
    held: list[bytes] = field(default_factory=list)


class ModelPages:
    """The pages of the ranks that serve a model. `mover` is None while there are none, or it is off.

    `busy` returns whether generations run.
    """

    def __init__(
        self, settings: WorkerSettings, telemetry: WorkerTelemetry, traffic: PageTraffic, busy: Callable[[], bool]
    ) -> None:
        self._settings, self._telemetry, self._traffic, self._busy = settings, telemetry, traffic, busy
        self.metrics = telemetry.pages
        self.mover: PageMover | None = None
        self._format = ""
        self._engine: EngineGroup | None = None
        self._weights: LoadedWeights | None = None
        self._flows: OrderedDict[int, _Flow] = OrderedDict()
        self._num_held = 0
        self._conversations = Conversations()
        self._outboxes: dict[str, Outbox] = {}
        self._tiers = {name: Outbox(name, tier, traffic.no_limit, self.metrics) for name, tier in traffic.tiers.items()}
        self._reads_earlier = "disk" in traffic.tiers
        self._extents = Extents()
        self._pace = PrefillPace()
        self._sources: dict[str, PageSource] = {name: PageSource(name, tier) for name, tier in traffic.tiers.items()}

    @property
    def on(self) -> bool:
        """Whether pages leave and come at all."""
        return self._settings.kv_replication != "none" or bool(self._tiers)

    @property
    def parks(self) -> bool:
        """Whether a paused conversation may come back from a tier."""
        return bool(self._tiers)

    def on_ready(self, group: EngineGroup, ranks: Sequence[RankReady], model: Path) -> None:
        """Begins with new ranks. The digest of their weights is computed when it is needed: with tiers at once."""
        lead = ranks[0]
        if not self.on or not lead.page_bytes:
            return
        sizes = PageSizes(lead.page_bytes, lead.hot_page_bytes, len(lead.windows))
        self._engine = group
        self.mover = PageMover(group, len(ranks), sizes, self._busy)
        hot_tokens = lead.hot_tokens if lead.hot_page_bytes else None
        self._format = lead.page_format
        self._extents = Extents(lead.windows, lead.block_size, hot_tokens=hot_tokens, lasting=lead.lasting)
        self._weights = LoadedWeights(model, lead.weights_stamp, self._telemetry.background, self._release)
        if self._tiers:
            self._weights.identify()

    def on_gone(self) -> None:
        """Ends with the ranks."""
        if self.mover is not None:
            self.mover.on_gone()
        if self._weights is not None:
            self._weights.close()
        self.mover = self._weights = self._engine = None
        self._flows.clear()
        self._num_held = 0
        self._conversations.clear()

    def on_answer(self, answer: PagesAnswer) -> None:
        """Takes a rank's answer about pages."""
        if self.mover is not None:
            self.mover.on_answer(answer)

    def scope(self, model: str, cache_scope: str, tenant: str = "") -> PageScope | None:
        """Returns the scope of these pages; None while it is not known.

        `tenant` is whose they are: the version before had the empty cache scope alone, and divided
        its pages on disk by tenants.
        """
        if self.mover is None or self._weights is None or (digest := self._weights.digest) is None:
            return None
        root = root_of(digest, self._format, cache_scope)
        earlier = root_of(digest, self._format, tenant) if self._reads_earlier and tenant and not cache_scope else b""
        return PageScope(model, cache_scope, root, self.mover.sizes, earlier)

    @property
    def weights_digest(self) -> bytes:
        """The digest of the weights that the ranks have loaded; empty while it is not known."""
        return b"" if self._weights is None else self._weights.digest or b""

    async def known(self, timeout_s: float) -> None:
        """Returns when the digest of the weights is known, or after the time. The ranks may be others, or gone, then."""
        if self._weights is not None:
            await self._weights.known(timeout_s)

    async def checked(self, model: str, cache_scope: str, root: bytes) -> tuple[PageMover, PageScope]:
        """Returns what another node's request is about.

        Raises FAILED_PRECONDITION for foreign pages, or when this node moves none, and UNAVAILABLE
        while it cannot yet.
        """
        if self._settings.kv_replication == "none":
            raise errors.failed_precondition("PAGES_OFF", "this node moves no pages (kv_replication none)")
        await self.known(_KNOWN_S)
        scope = self.scope(model, cache_scope)
        if scope is None or self.mover is None:
            self.metrics.refuse("not_ready")
            raise errors.unavailable("NODE_NOT_READY", f"node {self._settings.node_id} cannot take pages yet")
        if scope.root != root:
            self.metrics.refuse("foreign")
            log.warning("foreign pages refused", model=model)
            raise errors.failed_precondition("FOREIGN_PAGES", "pages of other weights, another format or another scope")
        return self.mover, scope

    def follow(self, group: int, attempt: Attempt, model: str) -> bool:
        """Returns whether the engine is to report the pages of a group that is about to be submitted."""
        policy = self._settings.kv_replication
        if self._weights is None or self._weights.failed or not (attempt.conversation or policy == "all"):
            return False
        place = attempt.backup if policy != "none" else None
        outboxes = [*self._tiers.values(), *([self._outbox(place)] if place is not None else [])]
        if not outboxes:
            return False
        self._weights.identify()
        self._flows[group] = _Flow(
            model, attempt.request.cache_scope, attempt.request.tenant, outboxes, attempt.conversation, place
        )
        if len(self._flows) > _MAX_FLOWS:
            self._num_held -= len(self._flows.popitem(last=False)[1].held)
        return True

    def may_restore(self, attempt: Attempt) -> bool:
        """Returns whether `restore` would look for pages of the attempt's prompt elsewhere."""
        known = self._weights is not None and not self._weights.failed
        return known and bool(attempt.conversation) and bool(self._tiers or attempt.previous)

    async def restore(self, attempt: Attempt, prompt_ids: Sequence[int], model: str) -> None:
        """Brings back pages of an attempt's prompt, from the tiers or another node, before it is submitted.

        Whatever goes wrong, the attempt runs without them.
        """
        try:
            await self._restore(attempt, prompt_ids, model)
        except Exception:
            log.exception("pages not restored", model=model)

    async def _restore(self, attempt: Attempt, prompt_ids: Sequence[int], model: str) -> None:
        tokens = [*prompt_ids, *attempt.generated[0].token_ids]
        if not self.may_restore(attempt) or len(tokens) <= LEAST_TOKENS:
            return
        ends_s = time.monotonic() + MOST_S
        await self.known(min(MOST_S, max(_KNOWN_LEAST_S, self._pace.worth_s(len(tokens)))))
        scope = self.scope(model, attempt.request.cache_scope, attempt.request.tenant)
        if scope is None or self.mover is None:
            return
        root = scope_root(attempt.request.cache_scope, attempt.request.adapter_digest)
        keys = chain_keys(tokens[:-1], self._extents.block_size, root)
        sources = [*(self._sources[name] for name in self._tiers), *self._previous(attempt)]
        await Restoring(self.mover, scope, self._extents, self._pace, self.metrics).run(keys, sources, ends_s)

    def _previous(self, attempt: Attempt) -> list[PageSource]:
        """Returns the node that may have the pages of earlier turns, if any and if it is not out of order."""
        place = attempt.previous
        if place is None or self._settings.kv_replication == "none" or (outbox := self._outbox(place)).rests:
            return []
        return [self._sources.setdefault(place.address, PageSource("node", outbox.store))]

    def on_step(self, events: StepEvents, before: EngineStats) -> None:
        """Queues the pages that became full in a step. `before`: the statistics of the step before."""
        self._pace.step(events, before)
        for group, choice, keys in events.returning:
            self._telemetry.background.once("pages_return", self._return(group, choice, keys))
        for group, keys in events.sealed:
            if (flow := self._flows.get(group)) is not None:
                self._take(flow, keys)

    async def _return(self, group: int, choice: int, keys: Sequence[bytes]) -> None:
        """Brings back pages of a paused choice from the tiers, where that is worth it, and lets it run on."""
        engine, flow, num = self._engine, self._flows.get(group), 0
        try:
            scope = None if flow is None else self.scope(flow.model, flow.cache_scope, flow.tenant)
            if scope is not None and self.mover is not None:
                restoring = Restoring(self.mover, scope, self._extents, self._pace, self.metrics)
                await restoring.run(keys, [self._sources[name] for name in self._tiers], time.monotonic() + _RETURN_S)
                num = restoring.num_restored
        finally:
            self.metrics.resumed("tier" if num else "computing")
            if engine is not None and engine is self._engine:
                engine.send(ReturnChoice(group, choice))

    def _take(self, flow: _Flow, keys: list[bytes]) -> None:
        """Queues keys of a flow, or holds them, not too many, until the digest is known."""
        flow.held += keys
        self._num_held += len(keys)
        if (scope := self.scope(flow.model, flow.cache_scope, flow.tenant)) is not None and self.mover is not None:
            self._queue(self.mover, scope, flow)
        elif self._num_held > MAX_QUEUED:
            self.metrics.drop("queue_full", len(flow.held))
            self._emptied(flow)

    def _release(self) -> None:
        """Queues what was held: the digest is known."""
        for flow in self._flows.values():
            if flow.held:
                self._take(flow, [])

    def _queue(self, mover: PageMover, scope: PageScope, flow: _Flow) -> None:
        for outbox in flow.outboxes:
            self._add(outbox, mover, scope, flow.last, flow.held)
        if flow.conversation and flow.place is not None:
            name = scope.root + flow.conversation + flow.tenant.encode()  # others may name theirs alike
            if not flow.begun:
                self._conversations.begin(name, Chain(scope, flow.place))
            self._conversations.add(name, flow.held)
            flow.begun = True
        self._emptied(flow)

    def _emptied(self, flow: _Flow) -> None:
        self._num_held -= len(flow.held)
        flow.last, flow.held = flow.held[-1], []

    def _add(self, outbox: Outbox, mover: PageMover, scope: PageScope, parent: bytes, keys: list[bytes]) -> None:
        if outbox.add(mover, scope, parent, keys):
            self._telemetry.background.once("page_outbox", self._empty(outbox))
        self._show_queued()

    async def _empty(self, outbox: Outbox) -> None:
        try:
            await outbox.run()
        finally:
            self._show_queued()

    def _show_queued(self) -> None:
        self.metrics.queued.set(sum(map(len, (*self._outboxes.values(), *self._tiers.values()))))

    def _outbox(self, place: NodePlace) -> Outbox:
        """Returns the queue of a node. Of many nodes the one that was used least recently is forgotten."""
        if (outbox := self._outboxes.get(place.address)) is None:
            if len(self._outboxes) >= _MAX_NODES:
                self._forget(min(self._outboxes, key=lambda address: self._outboxes[address].used_s))
            store = NodeStore(
                place.address,
                lambda: self.metrics.refuse("corrupt"),
                self._traffic.known,
                node_id=place.node_id,
                dialer=self._traffic.dialer,
            )
            outbox = self._outboxes[place.address] = Outbox(place.node_id, store, self._traffic.rate, self.metrics)
        return outbox

    def _forget(self, address: str) -> None:
        self._sources.pop(address, None)
        self._telemetry.background.once("page_outbox", self._outboxes.pop(address).store.close())

    async def hand_over(self) -> None:
        """Sends the pages of recent conversations to where they would go on, see `handing_over`."""
        if self._num_held:
            await self.known(MOST_S)
        await hand_over(self._conversations.newest_first(), self._send_chain)

    def _send_chain(self, chain: Chain) -> Outbox | None:
        """Queues a chain; returns the queue, or None when the ranks are gone."""
        if self.mover is None:
            return None
        outbox = self._outbox(chain.place)
        self._add(outbox, self.mover, chain.scope, b"", chain.keys)
        return outbox
