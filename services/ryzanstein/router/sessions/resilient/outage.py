"""Tracks whether the store works, and what happens until it does again.

Recovery retries with growing pauses and writes the backlog. While the store fails at once, as with
a full disk or a refused connection, a turn cuts the pause short: what it begins or ends after the
store came back must not be hidden from other routers until the pause is over. A store that keeps
its callers waiting is left to the pauses. Each outage is logged once, and its end once.

The backlog has the writes that the store could not take yet, in order. Each may be applied twice,
because it is unknown whether a failed write was done. A write that fails unexpectedly is retried like
any other. It is given up after that has happened three times while the store did everything else: a
write that can never succeed must not block the others forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.store import (
    SessionStore,
    StoreUnavailableError,
    UnexpectedStoreError,
    store_unavailable,
    unexpected,
)
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

# Nothing waits for the backlog, so a store that is merely slow may take this long.
_WRITE_TIMEOUT_S = 5.0
_MAX_BLAMES = 3


@dataclass(frozen=True, slots=True)
class Write:
    """A queued write.

    `done_by`: the error that means that it was done before or has become pointless.
    """

    session_id: str
    chars: int
    done_by: Code
    apply: Callable[[SessionStore], Awaitable[object]]
    generation_id: str = ""


class Backlog:
    """A queue of writes. Only `full` bounds it: what was already generated is always accepted."""

    def __init__(self, max_writes: int, max_chars: int, telemetry: RouterTelemetry) -> None:
        self._max_writes = max_writes
        self._max_chars = max_chars
        self._telemetry = telemetry
        self._writes: deque[Write] = deque()
        self._sessions: Counter[str] = Counter()
        self._generations: set[str] = set()
        self._chars = 0
        self._blames = 0

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def full(self) -> bool:
        """Whether no new turn may begin, because there would be no room for its answer."""
        return len(self._writes) >= self._max_writes or self._chars >= self._max_chars

    def touches(self, session_id: str) -> bool:
        return self._sessions[session_id] > 0

    def has_turn(self, generation_id: str) -> bool:
        return generation_id in self._generations

    def add(self, write: Write) -> None:
        self._writes.append(write)
        self._sessions[write.session_id] += 1
        self._generations.update({write.generation_id} - {""})
        self._chars += write.chars
        self._telemetry.store_backlog.set(len(self._writes))

    async def flush(self, store: SessionStore) -> None:
        """Applies writes until the queue is empty, including writes that are added meanwhile.

        On StoreUnavailableError the rest stays queued. On UnexpectedStoreError the first of the
        rest may be at fault, see `blame_first`.
        """
        while self._writes:
            await self._apply(self._writes[0], store)
            self._pop()

    def blame_first(self, error: UnexpectedStoreError) -> None:
        """Records that the store does everything but the first write.

        The third time, that write is given up.
        """
        self._blames += 1
        if self._blames >= _MAX_BLAMES:
            self.give_up_first(error)

    def give_up_first(self, error: UnexpectedStoreError) -> None:
        self._lost("unwritable", self._writes[0], error)
        self._pop()

    async def _apply(self, write: Write, store: SessionStore) -> None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await write.apply(store)
        except TimeoutError:
            raise store_unavailable(f"a write took longer than {_WRITE_TIMEOUT_S:g} s") from None
        except StoreUnavailableError:
            raise
        except RyzansteinError as error:
            if error.code is not write.done_by:
                self._lost("refused", write, error)
            elif write.generation_id and error.code is Code.NOT_FOUND:
                self._lost("session_gone", write, error)
        except Exception as error:
            raise unexpected(error) from error

    def _lost(self, cause: str, write: Write, error: Exception) -> None:
        self._telemetry.store_lost_writes.labels(cause).inc()
        log.error("session write lost", session_id=write.session_id, cause=cause, error=str(error))

    def _pop(self) -> None:
        write = self._writes.popleft()
        self._blames = 0
        self._chars -= write.chars
        self._generations.discard(write.generation_id)
        self._sessions[write.session_id] -= 1
        if not self._sessions[write.session_id]:
            del self._sessions[write.session_id]
        self._telemetry.store_backlog.set(len(self._writes))


_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PROBE_TIMEOUT_S = 1.0
# An attempt that fails later than this has waited, for example for SQLite's lock.
_AT_ONCE_S = 0.1
# No session has this id.
_PROBE_ID = ""


class StoreOutage:
    """An outage of the store: `begin` starts it, and its own recovery ends it.

    The users of the store check `active` and `reads_fail`.
    """

    def __init__(self, store: SessionStore, backlog: Backlog, telemetry: RouterTelemetry) -> None:
        self._store = store
        self._backlog = backlog
        self._telemetry = telemetry
        self._recovering: asyncio.Task[None] | None = None
        self._since = 0.0
        self._fails_at_once = False
        self._asked = asyncio.Event()
        self._attempted = asyncio.Event()
        self.reads_fail = False

    @property
    def active(self) -> bool:
        return self._recovering is not None

    def begin(self, error: StoreUnavailableError, *, reading: bool = False) -> None:
        """Starts the outage. Many callers may notice it at once.

        A store that cannot be written may still be readable.
        """
        self.reads_fail = self.reads_fail or reading
        if self._recovering is None:
            self._since = time.monotonic()
            self._fails_at_once = False
            self._telemetry.store_outage.set(1)
            self._telemetry.store_outages.inc()
            log.warning("session store fails, sessions are kept in memory", error=str(error))
            self._recovering = self._telemetry.background.supervise("store_recovery", self._recover, finite=True)

    async def retry(self, wait_s: float) -> None:
        """Tries the store again without the pause, and returns when that is done or after `wait_s`.

        Many callers share one attempt. Does nothing when there is no outage, or when the store did
        not fail at once the last time.
        """
        if not self.active or not self._fails_at_once:
            return
        self._asked.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._attempted.wait()

    async def close(self) -> None:
        """Tries once more. What cannot be written now is lost; that is logged and counted."""
        if self._recovering is not None:
            self._recovering.cancel()
            await asyncio.gather(self._recovering, return_exceptions=True)
        await self._flush_what_can_be()
        if lost := len(self._backlog):
            self._telemetry.store_lost_writes.labels("stopped").inc(lost)
            log.error("session writes lost, router stopped while the store fails", writes=lost)

    async def _flush_what_can_be(self) -> None:
        while True:
            try:
                return await self._backlog.flush(self._store)
            except UnexpectedStoreError as error:
                self._backlog.give_up_first(error)
            except StoreUnavailableError:
                return None

    async def _recover(self) -> None:
        pause_s, written, works = _FIRST_PAUSE_S, 0, False
        while not works:
            await self._pause(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            # Whoever asks from here on waits for the next attempt: this one may be past its turn.
            attempted, self._attempted = self._attempted, asyncio.Event()
            waiting = len(self._backlog)
            works = await self._attempt()
            written += max(0, waiting - len(self._backlog))
            attempted.set()
        self._end(written)

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._asked.wait()
        self._asked.clear()

    async def _attempt(self) -> bool:
        """Writes the backlog, and returns whether the store works. Then nothing waits any more."""
        began = time.monotonic()
        try:
            await self._flush()
            await self._probe()
            await self._flush()  # what was added during the probe
        except StoreUnavailableError as error:
            # A write that raises unexpected errors is given up after some attempts: not sooner.
            self._fails_at_once = time.monotonic() - began < _AT_ONCE_S and not isinstance(error, UnexpectedStoreError)
            log.debug("session store still fails", writes=len(self._backlog), error=str(error))
            return False
        return True

    async def _flush(self) -> None:
        try:
            await self._backlog.flush(self._store)
        except UnexpectedStoreError as error:
            await self._probe()  # raises if the store itself fails, whatever is written
            self._backlog.blame_first(error)
            raise

    def _end(self, written: int) -> None:
        self._recovering = None
        self._asked.clear()
        self._attempted.set()
        self._attempted = asyncio.Event()
        self.reads_fail = False
        self._telemetry.store_outage.set(0)
        log.info("session store works again", outage_s=round(time.monotonic() - self._since, 3), writes=written)

    async def _probe(self) -> None:
        """Does a write and a read that leave nothing behind."""
        generation_id = uuid.uuid4().hex
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._store.claim(ClaimRequest(_PROBE_ID, generation_id, "probe", _PROBE_TIMEOUT_S))
                await self._store.release(_PROBE_ID, generation_id, "probe")
                await self._store.list(1)
        except TimeoutError:
            raise store_unavailable("no answer") from None
        except StoreUnavailableError:
            raise
        except RyzansteinError:
            return  # another router probes at this moment, so the store answers
        except Exception as error:
            raise unexpected(error) from error
