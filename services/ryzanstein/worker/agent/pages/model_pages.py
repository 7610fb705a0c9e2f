"""The pages of one version of a model: which go where, and which come back before a prompt is computed.

It stands between the engine's events and the stores. Everything here is an optimization: whatever
fails, is late, damaged or foreign, is computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import structlog

from ryzanstein import errors
from ryzanstein.generation import Attempt, NodePlace
from ryzanstein.worker.agent.pages.conversations import Chain, Conversations
from ryzanstein.worker.agent.pages.mover import PageMover
from ryzanstein.worker.agent.pages.node_store import NodeStore
from ryzanstein.worker.agent.pages.outbox import Outbox
from ryzanstein.worker.agent.pages.page import root_of
from ryzanstein.worker.agent.pages.restoring import PrefillPace, Restoring, Source
from ryzanstein.worker.agent.pages.store import Scope
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.agent.pages.weights import weights_digest
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.engine.messages import EngineStats, StepEvents
from ryzanstein.worker.engine.prefix import chain_keys
from ryzanstein.worker.engines.group import EngineGroup
from ryzanstein.worker.engines.messages import PagesAnswer, RankReady
from ryzanstein.worker.telemetry import WorkerTelemetry

log = structlog.get_logger(__name__)

_MAX_FLOWS = 4096
_MAX_NODES = 64


@dataclass(slots=True)
class _Flow:
    """The pages of a group: their scope, where they go, and the last one that became full."""

    scope: Scope
    outboxes: Sequence[Outbox]
    conversation: bytes
    last: bytes = b""


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
        self._weights: bytes | None = None
        self._identifying: asyncio.Task[None] | None = None
        self._flows: OrderedDict[int, _Flow] = OrderedDict()
        self._conversations = Conversations()
        self._outboxes: dict[str, Outbox] = {}
        self._tiers = {name: Outbox(name, tier, traffic.no_limit, self.metrics) for name, tier in traffic.tiers.items()}
        self._extents = Extents()
        self._pace = PrefillPace()
        self._sources: dict[str, Source] = {name: Source(name, tier) for name, tier in traffic.tiers.items()}

    @property
    def on(self) -> bool:
        """Whether pages leave and come at all."""
        return self._settings.kv_replication != "none" or bool(self._tiers)

    def on_ready(self, group: EngineGroup, ranks: Sequence[RankReady], model: Path) -> None:
        """Begins with new ranks, as soon as the digest of the weights is known."""
        lead = ranks[0]
        if self.on and lead.page_bytes:
            self.mover, self._weights = PageMover(group, len(ranks), lead.page_bytes, self._busy), None
            self._format, self._extents = lead.page_format, Extents(lead.windows, lead.block_size, lasting=lead.lasting)
            loaded_s = time.time() - max(sum(rank.startup_phases.values()) for rank in ranks)
            self._identifying = self._telemetry.background.once("weights_digest", self._identify(self.mover, model, loaded_s))

    async def _identify(self, mover: PageMover, model: Path, loaded_s: float) -> None:
        stop = Event()
        try:
            digest = await asyncio.to_thread(weights_digest, model, loaded_s, stop.is_set)
        except OSError as error:
            log.warning("no pages are moved, the weights cannot be read", model=str(model), error=str(error))
            return
        finally:
            stop.set()  # the process would not end before its threads
        if self.mover is mover:
            self._weights = digest

    def on_gone(self) -> None:
        """Ends with the ranks."""
        if self.mover is not None:
            self.mover.on_gone()
        if self._identifying is not None:
            self._identifying.cancel()
        self.mover = self._identifying = None
        self._flows.clear()
        self._conversations.clear()

    def on_answer(self, answer: PagesAnswer) -> None:
        """Takes a rank's answer about pages."""
        if self.mover is not None:
            self.mover.on_answer(answer)

    def scope(self, model: str, tenant: str) -> Scope | None:
        """Returns the scope of a tenant's pages; None while pages cannot be moved."""
        if self.mover is None or self._weights is None:
            return None
        return Scope(model, tenant, root_of(self._weights, self._format, tenant), self.mover.page_bytes)

    def checked(self, model: str, tenant: str, root: bytes) -> tuple[PageMover, Scope]:
        """Returns what another node's request is about.

        Raises FAILED_PRECONDITION for foreign pages, or when this node moves none, and UNAVAILABLE
        while it cannot yet.
        """
        if self._settings.kv_replication == "none":
            raise errors.failed_precondition("PAGES_OFF", "this node moves no pages (kv_replication none)")
        scope = self.scope(model, tenant)
        if scope is None or self.mover is None:
            self.metrics.refuse("not_ready")
            raise errors.unavailable("NODE_NOT_READY", f"node {self._settings.node_id} cannot take pages yet")
        if scope.root != root:
            self.metrics.refuse("foreign")
            log.warning("foreign pages refused", model=model)
            raise errors.failed_precondition("FOREIGN_PAGES", "pages of other weights, another format or another tenant")
        return self.mover, scope

    def follow(self, group: int, attempt: Attempt, model: str) -> bool:
        """Returns whether the engine is to report the pages of a group that is about to be submitted."""
        scope = self.scope(model, attempt.request.tenant)
        policy = self._settings.kv_replication
        if scope is None or not (attempt.conversation or policy == "all"):
            return False
        place = attempt.backup if policy != "none" else None
        outboxes = [*self._tiers.values(), *([self._outbox(place)] if place is not None else [])]
        if not outboxes:
            return False
        conversation = attempt.conversation and scope.root + attempt.conversation  # tenants may name theirs alike
        self._flows[group] = _Flow(scope, outboxes, conversation)
        if len(self._flows) > _MAX_FLOWS:
            self._flows.popitem(last=False)
        if conversation and place is not None:
            self._conversations.begin(conversation, Chain(scope, place))
        return True

    def may_restore(self, attempt: Attempt) -> bool:
        """Returns whether `restore` would look for pages of the attempt's prompt elsewhere."""
        known = self.mover is not None and self._weights is not None
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
        scope = self.scope(model, attempt.request.tenant)
        if scope is None or self.mover is None or not self.may_restore(attempt):
            return
        tokens = [*prompt_ids, *attempt.generated[0].token_ids]
        keys = chain_keys(tokens[:-1], self._extents.block_size)
        sources = [*(self._sources[name] for name in self._tiers), *self._previous(attempt)]
        await Restoring(self.mover, scope, self._extents, self._pace, self.metrics).run(keys, sources)

    def _previous(self, attempt: Attempt) -> list[Source]:
        """Returns the node that may have the pages of earlier turns, if any and if it is not out of order."""
        place = attempt.previous
        if place is None or self._settings.kv_replication == "none" or (outbox := self._outbox(place)).rests:
            return []
        return [self._sources.setdefault(place.address, Source("node", outbox.store))]

    def on_step(self, events: StepEvents, before: EngineStats) -> None:
        """Queues the pages that became full in a step. `before`: the statistics of the step before."""
        self._pace.step(events, before)
        for group, keys in events.sealed:
            if (flow := self._flows.get(group)) is not None and self.mover is not None:
                self._queue(self.mover, flow, keys)

    def _queue(self, mover: PageMover, flow: _Flow, keys: list[bytes]) -> None:
        for outbox in flow.outboxes:
            self._add(outbox, mover, flow.scope, flow.last, keys)
        if flow.conversation:
            self._conversations.add(flow.conversation, keys)
        flow.last = keys[-1]

    def _add(self, outbox: Outbox, mover: PageMover, scope: Scope, parent: bytes, keys: list[bytes]) -> None:
        if outbox.add(mover, scope, parent, keys):
            self._telemetry.background.once("page_outbox", outbox.run())
        self.metrics.queued.set(sum(map(len, (*self._outboxes.values(), *self._tiers.values()))))

    def _outbox(self, place: NodePlace) -> Outbox:
        """Returns the queue of a node. Of many nodes the one that was used least recently is forgotten."""
        if (outbox := self._outboxes.get(place.address)) is None:
            if len(self._outboxes) >= _MAX_NODES:
                self._forget(min(self._outboxes, key=lambda address: self._outboxes[address].used_s))
            store = NodeStore(place.address, lambda: self.metrics.refuse("corrupt"))
            outbox = self._outboxes[place.address] = Outbox(place.node_id, store, self._traffic.rate, self.metrics)
        return outbox

    def _forget(self, address: str) -> None:
        self._sources.pop(address, None)
        self._telemetry.background.once("page_outbox", self._outboxes.pop(address).store.close())

    async def hand_over(self) -> None:
        """Sends the pages of recent conversations to where they would go on, the newest first."""
        for chain in self._conversations.newest_first():
            outbox = self._outbox(chain.place)
            if self.mover is not None and chain.keys:
                self._add(outbox, self.mover, chain.scope, b"", chain.keys)
            await outbox.empty.wait()
