"""PageService: other nodes' pages to this node's ranks, and this node's pages to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.addresses import host_of
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import pages_pb2 as pb
from ryzanstein.v1.pages_pb2_grpc import PageServiceServicer
from ryzanstein.wire.requests import cache_scope_from_wire, name_from_wire
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.pages.model_pages import ModelPages
from ryzanstein.worker.agent.pages.mover import PageMover, PagesLost
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope
from ryzanstein.worker.agent.pages.tiers import pieces
from ryzanstein.worker.agent.pages.tiers.pieces import (
    WHOLE_BYTES,
    Assembly,
    CorruptPage,
    checked_keys,
    checked_root,
    frames_of,
    whole_pages,
)
from ryzanstein.worker.engine.memory.travel import NAME_BYTES

Context = ServicerContext[Any, Any]

MAX_TRANSFERS = 16  # at once: each holds some pages in memory
MAX_OFFERS = 64  # at once: the ranks answer them between two steps
PEER_SHARE = 0.75  # of either, for one peer: others find a place beside one that never reads or writes
MAX_TRANSFER_S = 90.0  # a caller that neither reads nor writes loses its place then; nodes ask for 60 s
_HELD_BYTES = 8 * 2**20


class PageServicer(PageServiceServicer):
    """A thin adapter from gRPC to the pages of the node's models."""

    def __init__(self, models: NodeModels) -> None:
        self._models = models
        self._transfers = AtOnce(MAX_TRANSFERS, _too_many_transfers)
        self._offers = AtOnce(MAX_OFFERS, _too_many_offers)

    async def OfferPages(self, request: pb.OfferPagesRequest, context: Context) -> pb.OfferPagesResponse:
        self._require_staying(request.scope)
        keys = checked_keys(list(request.keys))
        with self._offers.of(context.peer()):
            _, mover, _ = await self._scope(request.scope)
            try:
                return pb.OfferPagesResponse(missing=await mover.missing(keys), whole_pages_bytes=WHOLE_BYTES)
            except PagesLost as error:
                raise _lost(error) from None

    async def SendPages(self, request_iterator: AsyncIterator[pb.SendPagesRequest], context: Context) -> pb.SendPagesResponse:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.HasField("begin"):
            raise errors.invalid("frame", "the first frame must be begin")
        _require_deadline(context)
        self._require_staying(first.begin.scope)
        if len(first.begin.parent) not in (0, NAME_BYTES):
            raise errors.invalid("begin.parent", f"must have {NAME_BYTES} bytes, or none", len(first.begin.parent))
        with self._transfers.of(context.peer()):
            pages, mover, scope = await self._scope(first.begin.scope)
            arriving = _Arriving(pages, mover, scope, first.begin.parent)
            try:
                async for request in requests:
                    await arriving.add(request)
                await arriving.flush()
            except PagesLost as error:
                raise _lost(error) from None
        return pb.SendPagesResponse(stored=arriving.stored, corrupt=arriving.corrupt)

    async def FetchPages(self, request: pb.FetchPagesRequest, context: Context) -> AsyncIterator[pb.FetchPagesResponse]:
        _require_deadline(context)
        left, whole_bytes = checked_keys(list(request.keys)), min(request.whole_pages_bytes, WHOLE_BYTES)
        num_bytes = 0
        with self._transfers.of(context.peer()):
            _, mover, scope = await self._scope(request.scope)
            while left and num_bytes < pieces.ANSWER_BYTES:
                size = mover.fits(left)
                try:
                    pages = await mover.take(left[:size])
                except PagesLost as error:
                    raise _lost(error) from None
                asked = [page for page, _ in takewhile(_alike, zip(pages, left, strict=False))]
                for frame in frames_of(pb.FetchPagesResponse, asked, scope.root, scope.sizes, whole_bytes):
                    yield frame
                if len(asked) < size:
                    return
                num_bytes += sum(len(page.content) for page in asked)
                left = left[size:]

    async def _scope(self, scope: pb.PageScope) -> tuple[ModelPages, PageMover, PageScope]:
        model, name = name_from_wire(scope.model, "scope.model"), cache_scope_from_wire(scope.tenant, "scope.tenant")
        pages = self._models.of(model).node.version.pages
        return pages, *await pages.checked(model, name, checked_root(scope.root))

    def _require_staying(self, scope: pb.PageScope) -> None:
        """Raises UNAVAILABLE while the node drains: nodes that stop together would fill one another."""
        node = self._models.of(name_from_wire(scope.model, "scope.model")).node
        if node.drains:
            raise errors.draining(node.settings.node_id)


class AtOnce:
    """A bound on calls that run at once, and on those of one peer. Raises `refusal` when there are too many."""

    def __init__(self, most: int, refusal: Callable[[], RyzansteinError]) -> None:
        self._most, self._most_of_one, self._refusal = most, max(1, int(most * PEER_SHARE)), refusal
        self._by_peer: Counter[str] = Counter()

    @property
    def running(self) -> int:
        return self._by_peer.total()

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Counts a call while it runs. `peer` is its address as gRPC writes it: all ports of a host are one peer."""
        host = host_of(peer)
        if self.running >= self._most or self._by_peer[host] >= self._most_of_one:
            raise self._refusal()
        self._by_peer[host] += 1
        try:
            yield
        finally:
            self._by_peer[host] -= 1
            if not self._by_peer[host]:
                del self._by_peer[host]


class _Arriving:
    """Pages that arrive in one call: put into the ranks some at a time, in order."""

    def __init__(self, pages: ModelPages, mover: PageMover, scope: PageScope, parent: bytes) -> None:
        self._pages, self._mover, self._scope, self._parent = pages, mover, scope, parent
        self._assembly = Assembly(scope.root, scope.sizes)
        self._held: list[Page] = []
        self._held_bytes = 0
        self.stored = self.corrupt = 0

    async def add(self, request: pb.SendPagesRequest) -> None:
        """Takes a message; returns when there is room for the next one."""
        num, left = 0, len(request.pages.keys) or 1
        try:
            for page in self._pages_of(request):
                num += 1
                if self.corrupt:
                    self.corrupt += 1
                else:
                    await self._hold(page)
        except CorruptPage:
            self._pages.metrics.refuse("corrupt")
            self.corrupt += left - num
        except RyzansteinError:
            self._pages.metrics.refuse("malformed")
            raise

    def _pages_of(self, request: pb.SendPagesRequest) -> Iterator[Page]:
        """Yields the pages that a message has or completes."""
        if request.HasField("pages"):
            if not self._assembly.whole:
                raise errors.invalid("frame", "must be the next piece of a page that was begun")
            yield from whole_pages(request.pages, self._scope.root, self._scope.sizes)
        elif not request.HasField("piece"):
            raise errors.invalid("frame", "must be pages, or a piece of one, after the first frame")
        elif (page := self._assembly.add(request.piece)) is not None:
            yield page

    async def _hold(self, page: Page) -> None:
        self._held.append(page)
        self._held_bytes += len(page.content)
        if self._held_bytes + self._scope.sizes.largest > _HELD_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Puts what has arrived into the ranks."""
        if not self._held:
            await asyncio.sleep(0)
            return
        held, self._held = self._held, []
        mean_bytes, self._held_bytes = self._held_bytes // len(held), 0
        stored = await self._mover.put(held, self._parent)
        self._parent = held[-1].key
        self.stored += stored
        self._pages.metrics.received(stored, stored * mean_bytes)
        self._pages.metrics.refuse("no_room", len(held) - stored)


def _require_deadline(context: Context) -> None:
    """Raises INVALID_ARGUMENT for a transfer that could hold its place longer than `MAX_TRANSFER_S`."""
    left_s = context.time_remaining()
    if left_s is None or left_s > MAX_TRANSFER_S:
        raise errors.invalid("deadline", f"a transfer of pages must have one, at most {MAX_TRANSFER_S:.0f} s ahead", left_s)


def _alike(found: tuple[Page, bytes]) -> bool:
    return found[0].key == found[1]


def _too_many_transfers() -> RyzansteinError:
    text = f"too many transfers of pages, the limit is {MAX_TRANSFERS}, and {int(MAX_TRANSFERS * PEER_SHARE)} for one peer"
    return RyzansteinError(text, Code.RESOURCE_EXHAUSTED, "TOO_MANY_TRANSFERS")


def _too_many_offers() -> RyzansteinError:
    text = f"too many offers of pages, the limit is {MAX_OFFERS}, and {int(MAX_OFFERS * PEER_SHARE)} for one peer"
    return RyzansteinError(text, Code.RESOURCE_EXHAUSTED, "TOO_MANY_OFFERS")


def _lost(error: PagesLost) -> RyzansteinError:
    return errors.unavailable("NODE_NOT_READY", str(error))
