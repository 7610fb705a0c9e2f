"""Reports of what was used, on their way to the store: queued while it is away, and sent again until it has them.

At most `MOST_WAITING` wait. Beyond that, those of generations that have ended and were never sent are
added up by tenant: the counts stay exact, under an id of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from itertools import islice

import structlog

from ryzanstein.backoff import Backoff, Streak
from ryzanstein.router.access.limits.hold import Hold, HoldKeeper
from ryzanstein.router.access.limits.usage import UsageBook, UsageReport

log = structlog.get_logger(__name__)

MOST_WAITING = 100_000
_MOST_AT_ONCE = 500
_BACKOFF = Backoff(0.1, 1.0)

Acknowledged = Callable[[Hold, UsageReport], None]
Totals = Callable[[str, str, int], None]


class UsageBacklog:
    """Sends reports to a book in the background.

    `on_written` is called with each report that the book has, `on_total` with the month and the tokens of each of their
    tenants, and `on_state` with whether the book can be reached when that changes.
    """

    def __init__(
        self,
        book: UsageBook,
        keeper: HoldKeeper,
        linger_s: float,
        *,
        on_written: Acknowledged,
        on_total: Totals,
        on_state: Callable[[bool], None],
    ) -> None:
        self._book, self._keeper, self._linger_s = book, keeper, linger_s
        self._on_written, self._on_total, self._on_state = on_written, on_total, on_state
        self._waiting: dict[str, Hold] = {}
        self._sums: dict[str, Hold] = {}
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._streak = Streak(_BACKOFF)
        self._pause_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def up(self) -> bool:
        """Whether the book could be reached last."""
        return not self._pause_s

    def put(self, hold: Hold) -> None:
        """Reports a hold as it is when it is sent. Later changes may be in the same report."""
        if len(self._waiting) >= MOST_WAITING and hold.generation_id not in self._waiting:
            self._fold()
        self._waiting[hold.generation_id] = hold
        self._idle.clear()
        self._news.set()

    def drop(self, hold: Hold) -> None:
        """Does not report a hold that was put."""
        self._waiting.pop(hold.generation_id, None)

    def failed(self, error: Exception) -> None:
        """Learns that the book cannot be reached. It is tried again in the background."""
        if self.up:
            log.warning("limits degraded", error=str(error))
            self._on_state(False)
        self._pause_s = self._streak.ended(0.0)
        self._news.set()

    async def run(self) -> None:
        """Sends what is put, until cancelled."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._pause_s or self._linger_s)
            self._news.clear()
            await self._sent_all()

    async def flushed(self, timeout_s: float) -> None:
        """Returns when all is sent that was put, or after the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def _sent_all(self) -> None:
        while True:
            batch = list(islice(self._waiting.values(), _MOST_AT_ONCE))
            for hold in batch:
                del self._waiting[hold.generation_id]
            try:
                await self._sent(batch)
            except ConnectionError as error:
                self._waiting = {hold.generation_id: hold for hold in batch} | self._waiting
                self.failed(error)
                return
            except BaseException:
                self._waiting = {hold.generation_id: hold for hold in batch} | self._waiting
                raise
            if len(self._waiting) < _MOST_AT_ONCE and not self.up:
                self._recovered()
            if not self._waiting:
                self._idle.set()
                return

    async def _sent(self, batch: Sequence[Hold]) -> None:
        if not batch:
            await self._book.attend()  # a probe
            return
        reports = [hold.report for hold in batch]
        for hold in batch:
            hold.tries += 1
            hold.sending = True
            if self._sums.get(hold.tenant) is hold:
                del self._sums[hold.tenant]
        try:
            totals = await self._book.write(reports)
        finally:
            for hold in batch:
                hold.sending = False
        for hold, report in zip(batch, reports, strict=True):
            hold.tries = 0
            self._on_written(hold, report)
        for tenant, (month, tokens) in totals.items():
            self._on_total(tenant, month, tokens)

    def _recovered(self) -> None:
        self._pause_s, self._streak = 0.0, Streak(_BACKOFF)
        log.info("limits no longer degraded")
        self._on_state(True)

    def _fold(self) -> None:
        """Adds up the reports of ended generations that were never sent, by tenant."""
        ended = [hold for hold in self._waiting.values() if not hold.live and not hold.tries and not hold.refund]
        for hold in ended:
            total = self._sums.get(hold.tenant)
            if total is hold:
                continue
            if total is None:
                total = Hold(self._keeper, hold.tenant, uuid.uuid4().hex, hold.bounds)
                total.live, total.local, total.confirmed = False, True, True
                self._sums[hold.tenant] = self._waiting[total.generation_id] = total
            more = hold.count.beyond(hold.known)
            total.requests += more.requests
            total.prompt += more.prompt
            total.generated += more.generated
            del self._waiting[hold.generation_id]
            self._keeper.folded(hold)
