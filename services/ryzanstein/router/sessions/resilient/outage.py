"""Tracks whether the store works, and what happens until it does again.

Recovery retries with growing pauses and writes the backlog. While the store fails at once, as with
a full disk or a refused connection, a turn cuts the pause short: what it begins or ends after the
store came back must not be hidden from other routers until the pause is over. A store that keeps
its callers waiting is left to the pauses. Each outage is logged once, and its end once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid

import structlog

from ryzanstein.errors import RyzansteinError
from ryzanstein.router.sessions.resilient.backlog import Backlog
from ryzanstein.router.sessions.store import (
    SessionStore,
    StoreUnavailableError,
    UnexpectedStoreError,
    store_unavailable,
    unexpected,
)
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

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
                await self._store.claim(_PROBE_ID, generation_id, "probe", _PROBE_TIMEOUT_S)
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
