"""The three stores, opened alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.router.sessions.room import StoreRoom
from ryzanstein.router.sessions.store import SessionBounds, SessionStore
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.storage.redis_client import redis_client

Opener = Callable[..., Awaitable[SessionStore]]


@pytest.fixture(params=["memory", "sqlite", "redis"])
async def open_store(request: pytest.FixtureRequest, start_redis: Any, tmp_path: Path) -> AsyncIterator[Opener]:
    opened: list[SessionStore] = []

    async def open_store(evicted: list[int] | None = None, room: StoreRoom | None = None, **bounds: Any) -> SessionStore:
        gone = [] if evicted is None else evicted
        store: SessionStore
        if request.param == "memory":
            store = MemorySessions(SessionBounds(**bounds), gone.append, room)
        elif request.param == "redis":
            client = redis_client((await start_redis()).url)
            store = await RedisSessions.open(client, "test:", SessionBounds(**bounds), gone.append)
        else:
            store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(**bounds), gone.append, room)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        await store.close()
