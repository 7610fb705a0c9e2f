"""Keeps the keys that the router holds equal to those of their source."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from ryzanstein.auth.audit.auditor import audit_log
from ryzanstein.auth.keys.records import KeySnapshot
from ryzanstein.router.access.stores.source import FoundKeys, HeldKeys, KeySource, KeysUnreadableError
from ryzanstein.router.access.telemetry import KeyMetrics

log = structlog.get_logger(__name__)

LOOK_S = 1.0
_MOST_AUDITED = 100


class KeyWatch:
    """Looks at the source each second, and when `look_now` is set. Start `run` as a task.

    A source that is away or has no keys changes nothing: the last good ones stay. The error is logged
    and counted once for each that is new.
    """

    def __init__(self, source: KeySource, held: HeldKeys, metrics: KeyMetrics) -> None:
        self._source, self._held, self._metrics = source, held, metrics
        self._fault = ""
        self._taken = False
        self.look_now = asyncio.Event()
        metrics.measure(source.name, lambda: held.age_s)

    async def start(self) -> None:
        """Takes the first keys. Raises KeysUnreadableError if the source has none, and no earlier run saved any."""
        try:
            snapshot = await self._source.newer()
            self._take(FoundKeys(snapshot)) if snapshot is not None else self._held.confirm()
        except KeysUnreadableError as error:
            self._failed(error)
            found = await self._source.saved()
            if found is None:
                raise
            self._take(found)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.look_now.wait()
            self.look_now.clear()
            await self.look()

    async def look(self) -> None:
        """Compares once."""
        try:
            snapshot = await self._source.newer()
        except KeysUnreadableError as error:
            self._failed(error)
            return
        if snapshot is not None:
            self._take(FoundKeys(snapshot))
        else:
            self._held.confirm()
        if self._fault:
            log.info("keys can be read again", source=self._source.name)
            self._fault = ""

    def _take(self, found: FoundKeys) -> None:
        if self._taken:
            self._audit(self._held.snapshot, found.snapshot)
        self._taken = True
        self._held.hold(found)
        keys, revoked, tenants = len(found.snapshot.keys), len(found.snapshot.revoked), len(found.snapshot.tenants)
        self._metrics.loaded(self._source.name, keys)
        log.info(
            "keys loaded", source=self._source.name, keys=keys, revoked=revoked, tenants=tenants, age_s=round(found.age_s, 1)
        )

    def _audit(self, before: KeySnapshot, after: KeySnapshot) -> None:
        """Says which keys a change adds, revokes and takes out: their ids, the first ones of many."""
        changed = {
            "added": after.keys.keys() - before.keys.keys(),
            "revoked": after.revoked.keys() - before.revoked.keys(),
            "removed": before.keys.keys() - after.keys.keys(),
        }
        if any(changed.values()):
            shown = {name: sorted(ids)[:_MOST_AUDITED] for name, ids in changed.items()}
            counts = {f"num_{name}": len(ids) for name, ids in changed.items()}
            audit_log.info("audit", audit=True, method="reload keys", target=self._source.name, **shown, **counts)

    def _failed(self, error: KeysUnreadableError) -> None:
        if str(error) != self._fault:
            self._fault = str(error)
            self._metrics.failed(self._source.name)
            log.error("keys cannot be read, the last ones stay", source=self._source.name, error=self._fault)
