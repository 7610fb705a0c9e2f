"""Opens the store named in the settings, and the layers between it and the requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from ryzanstein import errors
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.sessions.resilient.recent import Changes
from ryzanstein.router.sessions.resilient.store import OutagePolicy, ResilientSessions
from ryzanstein.router.sessions.room import LARGEST_SHARE, StoreRoom
from ryzanstein.router.sessions.store import ServingStore, SessionBounds, SessionStore
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.storage.redis_url import address
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)


def session_bounds(settings: RouterSettings) -> SessionBounds:
    # A kept response is its conversation and itself.
    most = (settings.max_sessions, settings.max_session_messages, settings.max_session_chars, 2 * settings.max_responses)
    return SessionBounds(*most, max_bytes=settings.store_bytes // LARGEST_SHARE)


@contextlib.asynccontextmanager
async def open_sessions(settings: RouterSettings, telemetry: RouterTelemetry) -> AsyncIterator[ServingStore]:
    """Yields the session store and closes it at the end.

    Raises OSError, sqlite3.Error or FAILED_PRECONDITION when the store exists and cannot be used. A
    Redis server that is away is not an error: it may come back.
    """
    if settings.session_store == "redis":
        async with _open_redis(settings, telemetry) as sessions:
            yield sessions
        return
    store: ServingStore
    metrics = telemetry.store_room
    evicted, room = metrics.evicted("number"), StoreRoom(settings.store_bytes, metrics.used.set, metrics.evicted("bytes"))
    if settings.session_store == "memory":
        store = MemorySessions(session_bounds(settings), evicted, room)
    else:
        path = (settings.session_dir or settings.state_dir) / "sessions.db"
        opened = await SqliteSessions.open(path, session_bounds(settings), evicted, room)
        store = _resilient(opened, settings, telemetry, opened.changes)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _open_redis(settings: RouterSettings, telemetry: RouterTelemetry) -> AsyncIterator[ServingStore]:
    try:
        # An optional dependency: installed only where it is used.
        from ryzanstein.router.sessions.stores.redis import RedisSessions
        from ryzanstein.router.sessions.stores.redis_changes import RedisChanges
        from ryzanstein.router.storage.redis_client import redis_client
    except ImportError as error:
        raise errors.failed_precondition(
            "REDIS_NOT_INSTALLED", f"session_store redis needs the redis package: pip install ryzanstein[redis] ({error})"
        ) from error

    url = settings.redis_url.get_secret_value()
    log.info("sessions in Redis", address=address(url))
    bounds, evicted = session_bounds(settings), telemetry.store_room.evicted("number")
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
    policy = OutagePolicy(
        settings.store_wait_s,
        settings.store_recent_sessions,
        settings.store_recent_chars,
        settings.store_backlog_writes,
        settings.store_backlog_chars,
    )
    return ResilientSessions(store, session_bounds(settings), policy, telemetry, changes)
