"""Tracks whether the store works, and what happens until it does again.

Recovery retries with growing pauses and writes the backlog. Each outage is logged once, and its end
once.
"""

from __future__ import annotations

import asyncio
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
            self._telemetry.store_outage.set(1)
            self._telemetry.store_outages.inc()
            log.warning("session store fails, sessions are kept in memory", error=str(error))
            self._recovering = self._telemetry.background.supervise("store_recovery", self._recover, finite=True)

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
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            waiting = len(self._backlog)
            try:
                await self._flush()
                await self._probe()
            except StoreUnavailableError as error:
                log.debug("session store still fails", writes=len(self._backlog), error=str(error))
            else:
                works = not len(self._backlog)
            written += max(0, waiting - len(self._backlog))
        self._end(written)

    async def _flush(self) -> None:
        try:
            await self._backlog.flush(self._store)
        except UnexpectedStoreError as error:
            await self._probe()  # raises if the store itself fails, whatever is written
            self._backlog.blame_first(error)
            raise

    def _end(self, written: int) -> None:
        self._recovering = None
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
