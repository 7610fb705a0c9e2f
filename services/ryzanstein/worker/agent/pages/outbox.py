"""What waits to be sent to one store: keys in the order in which their pages became full.

Only keys wait. The pages stay in the ranks until their turn, so the queue costs little, and a page
that is evicted meanwhile is skipped. When too many wait, the oldest are dropped.
A rate bounds the bytes that are sent in a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import structlog

from ryzanstein.worker.agent.pages.mover import PageMover, PagesLost
from ryzanstein.worker.agent.pages.page import Page
from ryzanstein.worker.agent.pages.store import PageScope, PageStore, StoreFailed
from ryzanstein.worker.page_metrics import PageMetrics

AT_ONCE_S = 0.1
"""A second's share that may be sent at once."""


class RateLimit:
    """A bound that all who send share. 0: none."""

    def __init__(self, bytes_s: int) -> None:
        self._bytes_s = bytes_s
        self._free_s = 0.0

    def most(self, num_bytes: int, seconds: float) -> int:
        """Returns how many bytes may be sent in so many seconds, at most `num_bytes`."""
        return min(num_bytes, int(self._bytes_s * seconds)) if self._bytes_s else num_bytes

    async def spend(self, num_bytes: int) -> None:
        """Returns when so many bytes may be sent."""
        if not self._bytes_s:
            return
        now = time.monotonic()
        self._free_s = max(self._free_s, now - AT_ONCE_S) + num_bytes / self._bytes_s
        if self._free_s > now:
            await asyncio.sleep(self._free_s - now)


log = structlog.get_logger(__name__)

MAX_QUEUED = 16_384
_OFFER_KEYS = 512
_BATCH_BYTES = 2**20  # about as many leave at once, and count for the rate
_CALL_BYTES = 32 * 2**20  # about, in one call: it must end in time also over a slow network
_CALL_S = 15.0  # the time that a call takes at most for its rate


@dataclass(frozen=True, slots=True)
class Queued:
    """A page that waits: where it is, under which scope it is sent, and what is before it in its chain."""

    mover: PageMover
    scope: PageScope
    key: bytes
    parent: bytes


class Outbox:
    """The queue of one store. Call `run` whenever `add` returns True; it returns when all is sent."""

    def __init__(
        self, name: str, store: PageStore, rate: RateLimit, metrics: PageMetrics, max_queued: int = MAX_QUEUED
    ) -> None:
        self.name, self.store = name, store
        self._rate, self._metrics, self._max_queued = rate, metrics, max_queued
        self._queue: deque[Queued] = deque()
        self._num_taken = 0
        self._rests_until = 0.0
        self.failure = ""
        """Why the store failed last."""
        self._runs = False
        self.used_s = time.monotonic()
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        return len(self._queue) + self._num_taken

    @property
    def rests(self) -> bool:
        """Whether the store failed so recently that nothing is sent to it."""
        return time.monotonic() < self._rests_until

    def end_rest(self) -> None:
        """Sends again, however recently the store failed."""
        self._rests_until = 0.0

    def add(self, mover: PageMover, scope: PageScope, parent: bytes, keys: Sequence[bytes]) -> bool:
        """Queues a piece of a chain, after the page `parent`. Returns whether `run` must be called."""
        self.used_s = time.monotonic()
        if self.rests:
            self._metrics.drop("resting", len(keys))
            return False
        parents = (parent, *keys)
        self._queue.extend(Queued(mover, scope, key, before) for key, before in zip(keys, parents, strict=False))
        while len(self._queue) > self._max_queued:
            self._queue.popleft()
            self._metrics.drop("queue_full")
        starts = bool(self._queue) and not self._runs
        if starts:
            self._runs = True
            self.empty.clear()
        return starts

    async def run(self) -> None:
        """Sends what waits."""
        try:
            while self._queue:
                await self._send_some()
        except StoreFailed as failure:
            self._rests_until, self.failure = time.monotonic() + failure.rest_s, failure.cause
            self._metrics.drop(failure.cause, len(self))
            log.warning("pages not sent", to=self.name, cause=failure.cause, pages=len(self), rest_s=failure.rest_s)
        finally:
            self._queue.clear()
            self._num_taken = 0
            self._runs = False
            self.empty.set()

    async def _send_some(self) -> None:
        """Sends the first pages that are of one mover and scope, as far as the store lacks them."""
        some = list(self._take_some())
        self._num_taken = len(some)
        mover, scope = some[0].mover, some[0].scope
        missing = await self.store.missing(scope, [each.key for each in some])
        most = self._rate.most(_CALL_BYTES, _CALL_S) // scope.sizes.largest
        for piece in _pieces(some, missing, max(1, most)):
            await self.store.send(scope, piece[0].parent, self._batches(mover, scope, [each.key for each in piece]))
        self._num_taken = 0

    def _take_some(self) -> Iterator[Queued]:
        """Takes the first ones, each once: choices of one prompt report the same pages."""
        first, known = self._queue[0], set[bytes]()
        for _ in range(min(_OFFER_KEYS, len(self._queue))):
            if (self._queue[0].mover, self._queue[0].scope) != (first.mover, first.scope):
                return
            queued = self._queue.popleft()
            if queued.key not in known:
                known.add(queued.key)
                yield queued

    async def _batches(self, mover: PageMover, scope: PageScope, keys: Sequence[bytes]) -> AsyncIterator[Sequence[Page]]:
        left = keys
        while left:
            size = mover.fits(left)
            try:
                pages: Sequence[Page] = await mover.take(left[:size])
            except PagesLost:
                self._metrics.drop("gone", len(left))
                return
            self._metrics.drop("gone", size - len(pages))
            left = left[size:]
            while pages:
                num = scope.sizes.fit((page.key for page in pages), self._rate.most(_BATCH_BYTES, AT_ONCE_S))
                batch, pages = pages[:num], pages[num:]
                num_bytes = sum(len(page.content) for page in batch)
                await self._rate.spend(num_bytes)
                yield batch
                self._metrics.sent(num_bytes, len(batch))


def _pieces(queued: Sequence[Queued], places: Sequence[int], most: int) -> Iterator[list[Queued]]:
    """Yields those at the places, each time as many as follow one another in a chain, at most `most`."""
    piece: list[Queued] = []
    for place in places:
        if place >= len(queued):
            return
        if piece and (len(piece) >= most or queued[place].parent != piece[-1].key):
            yield piece
            piece = []
        piece.append(queued[place])
    if piece:
        yield piece
