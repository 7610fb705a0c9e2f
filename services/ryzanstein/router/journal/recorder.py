"""Writes this router's generations into the journal, in the background.

The token path is not involved: a generation's own log is the buffer, and every `flush_s` a sweep
appends what is new in each generation. What a client relies on does not wait for the sweep: the
start and the end of a generation are written at once. While the store does not answer, everything
continues in memory and is written afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice

import structlog

from ryzanstein import clock
from ryzanstein.backoff import Backoff
from ryzanstein.process.background import Background
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.journal.encoding import BatchWriter, encode_request
from ryzanstein.router.journal.journal import Append, AppendOutcome, Journal, JournalUnavailableError, KeyClaim, Owner
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage

log = structlog.get_logger(__name__)

RECORDER = "journal_recorder"
MAX_APPENDS = 256
MAX_WRITE_BYTES = 2**20
MAX_WAIT_S = 0.25
# In an outage. What is not removed can be read until it expires.
MOST_REMOVALS = 65_536
_LONGEST_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class FlushPace:
    """The times of the journal.

    `flush_s`: how far it lags behind. `retention_s`: how long an entry outlives its last append.
    """

    flush_s: float
    retention_s: float


@dataclass(eq=False, slots=True)
class _Entry:
    """A generation's entry in the journal. `suspect`: the store may have lost it.

    `lost`: the store had lost it, and its key with it. `outages`: how many outages there had been
    when it was last written.
    """

    writer: BatchWriter
    new_messages: int
    opened: bool
    written_at: float
    settling: bool = False
    suspect: bool = False
    lost: bool = False
    outages: int = 0


class JournalRecorder:
    """Implements `Recorder`. Call `start` when the owner's address is known, `close` at the end."""

    def __init__(
        self, journal: Journal, pace: FlushPace, metrics: JournalMetrics, outage: JournalOutage, background: Background
    ) -> None:
        self._journal = journal
        self._pace = pace
        self._metrics = metrics
        self._outage = outage
        self._background = background
        self._owner: Owner | None = None
        self._on_moved: Callable[[Generation], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._entries: dict[str, _Entry] = {}
        self._settled: dict[str, _Entry] = {}
        self._next_look, self._looked_at = 0.0, 0
        self._epochs: dict[str, int] = {}
        self._urgent: dict[str, _Entry] = {}
        self._removals: dict[str, int] = {}  # epochs, by generation
        self._waiters: list[asyncio.Future[None]] = []
        self._wake = asyncio.Event()
        metrics.lag.set_function(lambda: sum(entry.writer.lag for entry in self._entries.values()))

    def start(self, owner: Owner, on_moved: Callable[[Generation], None]) -> None:
        """Starts writing. `on_moved` receives each generation that another router has taken."""
        self._owner, self._on_moved = owner, on_moved
        backoff = Backoff(self._pace.flush_s, _LONGEST_BACKOFF_S)
        self._task = self._background.supervise(RECORDER, partial(self._run, owner), backoff, on_end=self._broke)

    def added(self, generation: Generation, new_messages: int) -> None:
        """Adds a new generation, or one that was taken over, which is in the journal already."""
        if self._closed:
            return
        known = generation.epoch > 0
        self._epochs[generation.generation_id] = generation.epoch
        writer = BatchWriter(generation, known=known)
        entry = _Entry(writer, new_messages, known, time.monotonic(), outages=self._outage.number)
        if known and generation.settled:
            self._settled[generation.generation_id] = entry
            return
        self._entries[generation.generation_id] = entry
        if not known:
            self._hurry(generation.generation_id, entry)

    def ended(self, generation: Generation) -> None:
        if (entry := self._entries.get(generation.generation_id)) is not None:
            self._hurry(generation.generation_id, entry)

    def resumed(self, generation: Generation) -> None:
        """Continues a settled generation.

        What it gets from now on is written after its end: the last batch in the journal counts.
        """
        if (entry := self._settled.pop(generation.generation_id, None)) is not None:
            entry.suspect = True  # not written since it ended: it may have expired
            self._entries[generation.generation_id] = entry
        elif (entry := self._entries.get(generation.generation_id)) is not None:
            entry.settling = False  # its end may be on its way to the store

    def forgotten(self, generation: Generation) -> None:
        """Removes a generation that must no longer be read."""
        generation_id = generation.generation_id
        self._settled.pop(generation_id, None)
        self._entries.pop(generation_id, None)
        self._urgent.pop(generation_id, None)
        epoch = self._epochs.pop(generation_id, None)
        if epoch is not None and not self._closed:
            self._removals[generation_id] = epoch
            if len(self._removals) > MOST_REMOVALS:
                del self._removals[next(iter(self._removals))]
            self._wake.set()

    def forgetting(self, generation_id: str) -> bool:
        """Returns whether the generation is still in the journal but must no longer be found."""
        return generation_id in self._removals

    async def flushed(self, generation: Generation) -> None:
        """Returns when the generation is in the journal as it is now.

        Also returns if the store does not answer in time. Cancelling the wait does not cancel the
        write.
        """
        entry = self._entries.get(generation.generation_id)
        if entry is None or self._outage.lasts or self._task is None:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._hurry(generation.generation_id, entry)
        with suppress(TimeoutError):
            await asyncio.wait_for(waiter, MAX_WAIT_S)

    async def close(self) -> None:
        """Writes what is left and stops: another router may continue what still runs."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None and self._owner is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            try:
                await self._write(self._owner, list(self._entries.values()))
            except Exception:
                log.exception("generations not journalled at shutdown", generations=len(self._entries))
        self._entries.clear()
        self._settled.clear()

    def _hurry(self, generation_id: str, entry: _Entry) -> None:
        self._urgent[generation_id] = entry
        self._wake.set()

    async def _run(self, owner: Owner) -> None:
        backoff_s = self._pace.flush_s
        next_sweep = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, next_sweep - time.monotonic()))
            self._wake.clear()
            sweep = time.monotonic() >= next_sweep
            if await self._round(owner, sweep):
                backoff_s = self._pace.flush_s
                next_sweep = self._next_sweep(0.0 if sweep else next_sweep)
            else:
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
                # Never retry faster than without an outage, even if the lease can be renewed and
                # this write fails.
                await asyncio.sleep(self._pace.flush_s)
                await self._outage.over(backoff_s)

    def _next_sweep(self, planned: float) -> float:
        """Returns `planned` if it is not too late; 0: none is planned."""
        busy = self._entries or self._removals
        latest = time.monotonic() + (self._pace.flush_s if busy else self._pace.retention_s / 3)
        return min(planned or latest, latest)

    async def _round(self, owner: Owner, sweep: bool) -> bool:
        """Writes what is urgent, and in a sweep everything.

        Returns False if the store does not answer.
        """
        waiters, self._waiters = self._waiters, []
        urgent, self._urgent = self._urgent, {}
        entries = list(urgent.values())
        if sweep:
            due = [entry for entry in self._entries.values() if self._due(entry)]
            entries = [*due, *self._outliving()]
        try:
            if done := await self._write(owner, entries) and (not sweep or await self._remove()):
                self._outage.mended(RECORDER)
            return done
        finally:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _due(self, entry: _Entry) -> bool:
        old = time.monotonic() - entry.written_at > self._pace.retention_s / 3
        return entry.writer.news or not entry.opened or old or self._may_be_lost(entry)

    def _may_be_lost(self, entry: _Entry) -> bool:
        """Returns whether there was an outage since the entry was written, after which the store may have begun anew."""
        return entry.outages != self._outage.number

    def _outliving(self) -> list[_Entry]:
        """Returns the ended generations' entries to prolong, or to write again if the store has lost them.

        Looks seldom: they may be thousands.
        """
        now = time.monotonic()
        if now < self._next_look and self._looked_at == self._outage.number:
            return []
        self._next_look, self._looked_at = now + self._pace.retention_s / 6, self._outage.number
        return [entry for entry in self._settled.values() if self._may_be_lost(entry) or self._outlives(entry)]

    def _outlives(self, entry: _Entry) -> bool:
        """Returns whether a reader came back to an ended generation, so that its entry must live on."""
        generation, written_at = entry.writer.generation, entry.written_at
        was_read = generation.num_readers or generation.last_read_at > written_at
        return bool(was_read) and time.monotonic() - written_at > self._pace.retention_s / 2

    async def _write(self, owner: Owner, entries: Sequence[_Entry]) -> bool:
        left = list(reversed(entries))
        while left:
            some, appends = self._next_write(left)
            try:
                with self._metrics.flush.time():
                    outcomes = await self._journal.write(owner, appends)
                await self._claim_again([each for each in some if each.lost])
            except JournalUnavailableError as error:
                self._fail(error)
                return False
            self._outage.end(RECORDER)
            for entry, outcome in zip(some, outcomes, strict=True):
                self._conclude(entry, outcome)
        return True

    async def _claim_again(self, entries: Sequence[_Entry]) -> None:
        """Claims the keys of generations that are in the store again."""
        for entry in entries:
            generation, key = entry.writer.generation, entry.writer.generation.request.key
            if key is not None and (generation.error is None or generation.error.retry_after_s is not None):
                left_s = max(0.0, (generation.request.deadline or 0.0) - clock.unix_s())
                claim = KeyClaim(generation.generation_id, key.body)
                await self._journal.claim_key(key.name, claim, left_s + self._pace.retention_s)
            entry.lost = False

    def _next_write(self, left: list[_Entry]) -> tuple[list[_Entry], list[Append]]:
        """Takes from the end of `left` what makes one write of bounded size."""
        some: list[_Entry] = []
        appends: list[Append] = []
        num_bytes = 0
        while left and len(some) < MAX_APPENDS and num_bytes < MAX_WRITE_BYTES:
            entry = left.pop()
            if (append := self._append(entry)) is not None:
                some.append(entry)
                appends.append(append)
                num_bytes += len(append.batch) + len(append.request or b"")
        self._metrics.bytes.inc(num_bytes)
        return some, appends

    def _append(self, entry: _Entry) -> Append | None:
        """Returns the append; None for a generation that cannot be encoded.

        That one continues in memory only, and keeps no other out of the journal.
        """
        generation = entry.writer.generation
        entry.settling = generation.settled
        try:
            request = None if entry.opened else encode_request(generation, entry.new_messages)
            return Append(generation.generation_id, generation.epoch, entry.writer.next_batch(), request)
        except Exception:
            log.exception("generation cannot be journalled", generation_id=generation.generation_id)
            self._metrics.unwritable.inc()
            self._entries.pop(generation.generation_id, None)
            return None

    def _broke(self, error: Exception) -> None:
        """Handles an unexpected end of the task: it is unknown what of the last write was done."""
        self._outage.broke(RECORDER)
        self._suspect_all()

    def _fail(self, error: JournalUnavailableError) -> None:
        self._outage.begin(error)
        self._suspect_all()

    def _suspect_all(self) -> None:
        for entry in (*self._entries.values(), *self._settled.values()):
            entry.suspect = True

    def _conclude(self, entry: _Entry, outcome: AppendOutcome) -> None:
        generation_id = entry.writer.generation.generation_id
        known = self._settled if generation_id in self._settled else self._entries
        if known.get(generation_id) is not entry:
            return
        if outcome is AppendOutcome.WRITTEN:
            self._written(generation_id, entry)
        elif outcome is AppendOutcome.EXPIRED or (outcome is AppendOutcome.MISSING and not self._overslept(entry)):
            # It expired, or the store has lost it: write everything again.
            entry.opened, entry.lost = False, True
            entry.writer.rewind()
            self._entries[generation_id] = known.pop(generation_id)
        else:
            del known[generation_id]
            del self._epochs[generation_id]
            self._metrics.moved.inc()
            self._on_moved(entry.writer.generation)

    def _written(self, generation_id: str, entry: _Entry) -> None:
        entry.writer.written()
        entry.opened, entry.suspect, entry.written_at = True, False, time.monotonic()
        entry.outages = self._outage.number
        if entry.settling:
            self._settled[generation_id] = self._entries.pop(generation_id, entry)

    def _overslept(self, entry: _Entry) -> bool:
        """Returns whether another router may have taken, finished and forgotten the generation.

        That is possible if this router was stopped for longer than the retention.
        """
        return not entry.suspect and time.monotonic() - entry.written_at > self._pace.retention_s

    async def _remove(self) -> bool:
        removals = list(islice(self._removals.items(), 4 * MAX_APPENDS))
        if not removals:
            return True
        try:
            await self._journal.remove(removals)
        except JournalUnavailableError as error:
            self._fail(error)
            return False
        self._outage.end(RECORDER)
        for generation_id, _ in removals:
            del self._removals[generation_id]
        return True
