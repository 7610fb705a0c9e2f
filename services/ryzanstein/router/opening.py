"""Opens the stores that the settings name: the session store, and the journal with a core on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from ryzanstein import errors
from ryzanstein.router.access.limits.allowance import LimitsOf, SharedLimits, TenantAllowance, no_limits
from ryzanstein.router.access.limits.books.memory import MemoryUsage
from ryzanstein.router.access.limits.books.sqlite import SqliteUsage
from ryzanstein.router.access.limits.metrics import LimitMetrics
from ryzanstein.router.access.limits.usage import MIN_KEEP_S, UsageBook
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.core.clustered import ClusteredCore, ClusterParts
from ryzanstein.router.core.parts import CoreParts
from ryzanstein.router.core.peers import Peers
from ryzanstein.router.journal.journal import Journal
from ryzanstein.router.journal.keys import JournalKeys
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage
from ryzanstein.router.journal.recorder import FlushPace, JournalRecorder
from ryzanstein.router.journal.stores.sqlite import SqliteJournal
from ryzanstein.router.sessions.resilient.recent import Changes
from ryzanstein.router.sessions.resilient.store import ResilientSessions
from ryzanstein.router.sessions.room import LARGEST_SHARE, StoreRoom
from ryzanstein.router.sessions.store import ServingStore, SessionBounds, SessionStore
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.storage.redis_url import address

log = structlog.get_logger(__name__)


def session_bounds(settings: RouterSettings, limits_of: LimitsOf = no_limits) -> SessionBounds:
    # A kept response is its conversation and itself.
    most = (settings.max_sessions, settings.max_session_messages, settings.max_session_chars, 2 * settings.max_responses)
    room = settings.store_bytes // LARGEST_SHARE
    return SessionBounds(*most, max_bytes=room, most_sessions_of=lambda tenant: limits_of(tenant).sessions)


@asynccontextmanager
async def open_sessions(
    settings: RouterSettings, telemetry: RouterTelemetry, limits_of: LimitsOf = no_limits
) -> AsyncIterator[ServingStore]:
    """Yields the session store, of which tenants have these limits, and closes it at the end.

    Raises OSError, sqlite3.Error or FAILED_PRECONDITION when the store exists and cannot be used. A
    Redis server that is away is not an error: it may come back.
    """
    telemetry.store_info.labels(settings.session_store).set(1)
    if settings.session_store == "redis":
        async with _open_redis(settings, telemetry, session_bounds(settings, limits_of)) as sessions:
            yield sessions
        return
    store: ServingStore
    metrics = telemetry.store_room
    evicted, room = metrics.evicted("number"), StoreRoom(settings.store_bytes, metrics.used.set, metrics.evicted("bytes"))
    if settings.session_store == "memory":
        store = MemorySessions(session_bounds(settings, limits_of), evicted, room)
    else:
        path = (settings.session_dir or settings.state_dir) / "sessions.db"
        opened = await SqliteSessions.open(path, session_bounds(settings, limits_of), evicted, room)
        store = _resilient(opened, settings, telemetry, opened.changes)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _open_redis(
    settings: RouterSettings, telemetry: RouterTelemetry, bounds: SessionBounds
) -> AsyncIterator[ServingStore]:
    try:
        # An optional dependency: installed only where it is used.
        from ryzanstein.router.sessions.stores.redis import RedisSessions
        from ryzanstein.router.sessions.stores.redis_changes import RedisChanges
        from ryzanstein.storage.redis_client import redis_client
    except ImportError as error:
        raise errors.failed_precondition(
            "REDIS_NOT_INSTALLED", f"session_store redis needs the redis package: pip install ryzanstein[redis] ({error})"
        ) from error

    url = settings.redis_url.get_secret_value()
    log.info("sessions in Redis", address=address(url))
    evicted = telemetry.store_room.evicted("number")
    store = await RedisSessions.open(redis_client(url), settings.redis_prefix, bounds, evicted)
    sessions = _resilient(store, settings, telemetry)
    recent = sessions.recent
    changes = RedisChanges(redis_client(url), settings.redis_prefix, store.origin, recent.forget, recent.forget_all)
    # Changes are missed while nothing listens.
    listening = telemetry.background.supervise("session_changes", changes.run, on_end=lambda _: recent.forget_all())
    try:
        yield sessions
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await changes.close()
        await sessions.close()


def _resilient(
    store: SessionStore, settings: RouterSettings, telemetry: RouterTelemetry, changes: Changes | None = None
) -> ResilientSessions:
    return ResilientSessions(store, session_bounds(settings), settings.tuning.store, telemetry, changes)


OpenLimits = Callable[[RouterSettings, str, RouterTelemetry, LimitsOf], AbstractAsyncContextManager[TenantAllowance]]
"""Opens what tenants may use; see `open_allowance`."""


@asynccontextmanager
async def open_allowance(
    settings: RouterSettings, router_id: str, telemetry: RouterTelemetry, limits_of: LimitsOf
) -> AsyncIterator[TenantAllowance]:
    """Yields what tenants may use. Their counts are where sessions are; a store that is away may come back."""
    metrics = LimitMetrics(telemetry.registry)
    keep_s = max(MIN_KEEP_S, 2 * _retention_s(settings))
    book: UsageBook
    shared: SharedLimits | None = None
    linger_s = 0.05
    if settings.session_store == "redis":
        # An optional dependency: it is installed only where it is used.
        from ryzanstein.router.access.limits.books.redis import RedisLimits
        from ryzanstein.storage.redis_client import redis_client

        client = redis_client(settings.redis_url.get_secret_value())
        book = shared = RedisLimits(client, settings.redis_prefix, router_id, telemetry.background, keep_s=keep_s)
        linger_s = 0.002
    elif settings.session_store == "sqlite":
        book = SqliteUsage((settings.session_dir or settings.state_dir) / "usage.db", router_id, keep_s)
    else:
        book = MemoryUsage()
    allowance = TenantAllowance(book, metrics, limits_of, shared=shared, linger_s=linger_s)
    async with allowance.running(telemetry.background):
        yield allowance


@dataclass(frozen=True, slots=True)
class OpenJournal:
    """A journal, and the routers that share it."""

    journal: Journal
    peers: Peers


@asynccontextmanager
async def open_journal(settings: RouterSettings, dialer: Dialer = PLAIN) -> AsyncIterator[OpenJournal | None]:
    """Yields the open journal, or None when generations are only in memory.

    Raises OSError or sqlite3.Error when the journal's file cannot be used.
    """
    if settings.session_store == "memory":
        yield None
        return
    journal = await _opened(settings)
    try:
        yield OpenJournal(journal, Peers(journal, settings.lease_s, dialer))
    finally:
        await journal.close()


def journalled_core(opened: OpenJournal, settings: RouterSettings, owner_id: str, parts: CoreParts) -> ClusteredCore:
    """Returns a core with a journal."""
    telemetry, retention_s = parts.telemetry, _retention_s(settings)
    metrics = JournalMetrics(telemetry.registry)
    outage = JournalOutage(metrics)
    pace = FlushPace(settings.tuning.journal_flush_s, retention_s)
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
    from ryzanstein.storage.redis_client import redis_client

    client = redis_client(settings.redis_url.get_secret_value(), decode_responses=False)
    return RedisJournal(client, f"{settings.redis_prefix}journal:", settings.lease_s, _retention_s(settings))


def _retention_s(settings: RouterSettings) -> float:
    """Returns how long an entry outlives its last append.

    After the death of a router that covers the rest of its lease and the window in which a client
    may come back.
    """
    return settings.lease_s + settings.reattach_window_s
