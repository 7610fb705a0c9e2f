"""Opens the journal that the settings name, and builds a core on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from ryzanstein.router.config import RouterSettings
from ryzanstein.router.core.clustered import ClusteredCore, ClusterParts
from ryzanstein.router.core.parts import CoreParts
from ryzanstein.router.core.peers import Peers
from ryzanstein.router.journal.journal import Journal
from ryzanstein.router.journal.keys import JournalKeys
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage
from ryzanstein.router.journal.recorder import FlushPace, JournalRecorder
from ryzanstein.router.journal.stores.sqlite import SqliteJournal


@dataclass(frozen=True, slots=True)
class OpenJournal:
    """A journal, and the routers that share it."""

    journal: Journal
    peers: Peers


@asynccontextmanager
async def open_journal(settings: RouterSettings) -> AsyncIterator[OpenJournal | None]:
    """Yields the open journal, or None when generations are only in memory.

    Raises OSError or sqlite3.Error when the journal's file cannot be used.
    """
    if settings.session_store == "memory":
        yield None
        return
    journal = await _opened(settings)
    try:
        yield OpenJournal(journal, Peers(journal, settings.lease_s))
    finally:
        await journal.close()


def journalled_core(opened: OpenJournal, settings: RouterSettings, owner_id: str, parts: CoreParts) -> ClusteredCore:
    """Returns a core with a journal."""
    telemetry, retention_s = parts.telemetry, _retention_s(settings)
    metrics = JournalMetrics(telemetry.registry)
    outage = JournalOutage(metrics)
    pace = FlushPace(settings.journal_flush_s, retention_s)
    cluster = ClusterParts(
        opened.journal,
        JournalRecorder(opened.journal, pace, metrics, outage, telemetry.background),
        opened.peers,
        owner_id,
        settings.lease_s,
        metrics,
        outage,
    )
    return ClusteredCore(replace(parts, keys=JournalKeys(opened.journal, retention_s, outage)), cluster)


async def _opened(settings: RouterSettings) -> Journal:
    if settings.session_store == "sqlite":
        path = (settings.session_dir or settings.state_dir) / "journal.db"
        return await SqliteJournal.open(path, settings.lease_s, _retention_s(settings), settings.max_journal_bytes)
    # An optional dependency: it is installed only where it is used.
    from ryzanstein.router.journal.stores.redis import RedisJournal
    from ryzanstein.router.storage.redis_client import redis_client

    client = redis_client(settings.redis_url.get_secret_value(), decode_responses=False)
    return RedisJournal(client, f"{settings.redis_prefix}journal:", settings.lease_s, _retention_s(settings))


def _retention_s(settings: RouterSettings) -> float:
    """Returns how long an entry outlives its last append.

    After the death of a router that covers the rest of its lease and the window in which a client
    may come back.
    """
    return settings.lease_s + settings.reattach_window_s
