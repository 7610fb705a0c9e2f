"""What a store holds is bounded in bytes: the least recently used goes first, and the file shrinks."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.caller import tenant_digest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.opening import open_sessions, session_bounds
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.room import MESSAGE_BYTES, StoreRoom, bytes_of
from ryzanstein.router.sessions.store import SessionBounds, SessionStore
from ryzanstein.router.sessions.stores import sqlite
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.storage.bounds import LOG_BYTES
from ryzanstein.router.telemetry import RouterTelemetry

MB = 2**20
NOBODY = tenant_digest("")
TEXT = (Message(Role.USER, "x" * 100_000),)
Bounded = Callable[..., Awaitable[SessionStore]]


@pytest.fixture(params=["memory", "sqlite"])
async def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bounded]:
    """Opens a store with so many bytes. Redis has a bound of its own."""
    opened: list[SessionStore] = []

    async def bounded(room: StoreRoom, bounds: SessionBounds | None = None) -> SessionStore:
        store: SessionStore
        bounds = bounds or SessionBounds()
        if request.param == "memory":
            store = MemorySessions(bounds, lambda count: None, room)
        else:
            store = await SqliteSessions.open(tmp_path / "s.db", bounds, lambda count: None, room)
        opened.append(store)
        return store

    yield bounded
    for store in opened:
        await store.close()


async def there(store: SessionStore, session_ids: list[str]) -> list[str]:
    found = []
    for session_id in session_ids:
        try:
            found.append((await store.get(session_id)).session_id)
        except RyzansteinError as error:
            if error.code is not Code.NOT_FOUND:
                raise
    return found


async def test_sessions_and_responses_share_the_bytes_and_the_least_recently_used_goes_first(bounded: Bounded) -> None:
    used: list[int] = []
    evicted: list[int] = []
    store = await bounded(StoreRoom(8 * MB, used.append, evicted.append))
    ids = []
    for number in range(200):
        ids += [f"s{number}", f"{NOBODY}-resp_{number}", f"{NOBODY}-resp_{number}.object"]
        for session_id in ids[-3:]:
            await store.create(session_id, "m", TEXT)
        await store.append("s0", (Message(Role.USER, "still here"),), model="m", node_id="a")
    kept = await there(store, ids)
    assert kept == ["s0", *ids[len(ids) - len(kept) + 1 :]] or kept == ["s0", *ids[len(ids) - len(kept) :]]
    assert 60 < len(kept) < 90
    assert max(used) <= 8 * MB + 110_000, "one that is new, before others go for it"
    assert sum(evicted) > 300, "an object goes with its response"


async def test_a_tenant_with_more_than_half_of_the_bytes_evicts_its_own(bounded: Bounded) -> None:
    evicted: list[int] = []
    store = await bounded(StoreRoom(8 * MB, on_evicted=evicted.append))
    quiet, digest = [], tenant_digest("quiet")
    for number in range(5):
        quiet += [f"q{number}", f"{digest}-resp_{number}", f"{digest}-resp_{number}.object"]
        for session_id in quiet[-3:]:
            await store.create(session_id, "m", TEXT, tenant="quiet" if session_id[0] == "q" else "")
    nobody = ["n0", "n1"]
    for session_id in nobody:
        await store.create(session_id, "m", TEXT)
    digest = tenant_digest("greedy")
    for number in range(100):
        await store.create(f"g{number}", "m", TEXT, tenant="greedy")
        await store.append(f"g{number}", TEXT, model="m", node_id="a")
        await store.create(f"{digest}-resp_{number}", "m", TEXT)
    assert await there(store, [*quiet, *nobody]) == [*quiet, *nobody]
    kept = await there(store, [f"g{number}" for number in range(100)])
    assert kept == [f"g{number}" for number in range(100 - len(kept), 100)]
    assert len(kept) >= 5
    assert sum(evicted) > 100


async def test_a_claimed_session_is_not_evicted_for_bytes(bounded: Bounded) -> None:
    store = await bounded(StoreRoom(2 * MB))
    await store.create("claimed", "m", TEXT)
    await store.claim(ClaimRequest("claimed", "g", "r", 60.0))
    for number in range(50):
        await store.create(f"s{number}", "m", TEXT)
    assert await there(store, ["claimed", "s0", "s49"]) == ["claimed", "s49"]


async def test_a_new_session_is_not_evicted_for_bytes_by_a_clock_that_was_set_back(
    bounded: Bounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await bounded(StoreRoom(2 * MB))
    with monkeypatch.context() as ahead:
        later = time.time() + 3600.0
        ahead.setattr(sqlite.time, "time", lambda: later)
        for number in range(30):
            await store.create(f"s{number}", "m", TEXT)
    for number in range(3):
        await store.create(f"new{number}", "m", TEXT)
        await asyncio.sleep(0.05)
        assert await there(store, [f"new{number}"])


@pytest.mark.parametrize("session_id", ["s", "0123456789abcdef-resp_1"])
async def test_one_that_is_larger_than_the_store_may_hold_is_refused_by_field_and_bound(
    bounded: Bounded, session_id: str
) -> None:
    store = await bounded(StoreRoom(2 * MB), SessionBounds(max_chars=10 * MB, max_bytes=MB))
    await store.create("before", "m", TEXT)
    with pytest.raises(
        RyzansteinError, match=f"messages: must have at most {MB} bytes, a quarter of max_store_bytes"
    ) as refused:
        await store.create(session_id, "m", (Message(Role.USER, "ü" * (MB // 2)),))
    assert (refused.value.code, refused.value.reason) == (Code.FAILED_PRECONDITION, "SESSION_FULL")
    assert refused.value.violations[0].field == "messages"
    assert await there(store, ["before"]) == ["before"]


def test_the_bytes_of_a_message_are_those_of_its_text_in_utf_8() -> None:
    assert bytes_of((Message(Role.USER, "ü" * 1000),)) - bytes_of((Message(Role.USER, ""),)) == 2000


def size(path: Path) -> int:
    return path.stat().st_size


async def settled(path: Path, most: int, until: Any) -> None:
    await until(lambda: size(path) <= most)


async def test_the_file_never_grows_above_its_bound_and_shrinks_when_sessions_are_deleted(tmp_path: Path, until: Any) -> None:
    path = tmp_path / "s.db"
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None, StoreRoom(16 * MB))
    most = log = 0
    for number in range(400):
        await store.create(f"s{number}", "m", TEXT)
        most, log = max(most, size(path)), max(log, size(tmp_path / "s.db-wal"))
    assert 12 * MB < most <= 16 * MB
    assert log < LOG_BYTES
    for number in await there(store, [f"s{number}" for number in range(400)]):
        await store.delete(number)
    await settled(path, 5 * MB, until)
    await store.close()


async def test_a_file_of_the_version_before_is_converted_and_then_shrinks(tmp_path: Path, until: Any) -> None:
    path = tmp_path / "s.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE sessions_of_old (text)")
        db.executemany("INSERT INTO sessions_of_old VALUES (?)", [("x" * 100_000,)] * 80)
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        db.execute("DROP TABLE sessions_of_old")
    await store.create("s", "m")
    await settled(path, 5 * MB, until)
    await store.close()


async def test_the_default_bounds_are_those_of_the_store(tmp_path: Path) -> None:
    for kind, most in (("memory", 128 * MB), ("sqlite", 1024 * MB)):
        settings = RouterSettings(session_store=kind, state_dir=tmp_path)
        assert (settings.store_bytes, session_bounds(settings).max_bytes) == (most, most // 4)
        telemetry = RouterTelemetry()
        async with open_sessions(settings, telemetry) as store:
            await store.create("s", "m", TEXT)
            assert 100_000 < (telemetry.registry.get_sample_value("ryzanstein_router_store_bytes") or 0) < 300_000
        causes = [("ryzanstein_router_sessions_evicted_total", {"cause": cause}) for cause in ("number", "bytes")]
        assert [telemetry.registry.get_sample_value(*each) for each in causes] == [0.0, 0.0]
    assert RouterSettings(session_store="memory", max_store_bytes=16 * MB, state_dir=tmp_path).store_bytes == 16 * MB


async def test_eviction_lets_others_use_the_store_meanwhile(tmp_path: Path) -> None:
    """A store that is opened with a smaller bound has much to evict; the first answer does not wait for all of it."""
    path = tmp_path / "s.db"
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None)
    await asyncio.gather(*(store.create(f"s{number}", "m", (Message(Role.USER, "x" * 2000),)) for number in range(1500)))
    await store.close()
    evicted: list[int] = []
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None, StoreRoom(2 * MB, on_evicted=evicted.append))
    await store.create("new", "m")
    assert sum(evicted) < 400
    async with asyncio.timeout(20):
        while size(path) > 2 * MB:
            await store.get("new")
    assert sum(evicted) > 500
    await store.close()


async def test_one_that_takes_the_room_of_many_others_is_stored(bounded: Bounded) -> None:
    most = 16 * MB
    store = await bounded(StoreRoom(most), SessionBounds(max_chars=most, max_bytes=most // 4))
    for number in range(1500):
        await store.create(f"s{number}", "m", (Message(Role.USER, "x" * 10_000),))
    messages = tuple(Message(Role.USER, "x" * 2100) for _ in range(most // 4 // (2100 + MESSAGE_BYTES)))
    await store.create("large", "m", messages)
    assert (await store.get("large")).messages == messages


async def test_what_has_a_damaged_name_is_evicted_too(tmp_path: Path) -> None:
    path, response = tmp_path / "s.db", f"{0:016x}-resp_1"
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None, StoreRoom(2 * MB))
    for session_id in ("s", response, response + ".object"):
        await store.create(session_id, "m", TEXT)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE sessions SET session_id = CAST(x'ff73' AS TEXT) WHERE session_id = 's'")
        db.execute("UPDATE responses SET session_id = ?", (response.replace("_1", "_3"),))
    for number in range(40):
        await store.create(f"s{number}", "m", TEXT)
    assert await there(store, ["s39"]) == ["s39"]
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM sessions WHERE CAST(session_id AS BLOB) = x'ff73'").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM responses").fetchone() == (0,)


async def test_a_log_that_a_reader_kept_is_cut_when_that_reader_is_gone(tmp_path: Path) -> None:
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sessions").fetchall()
        for number in range(200):
            await store.create(f"s{number}", "m", TEXT)
        assert size(tmp_path / "s.db-wal") > 18 * MB
    for session_id in ("a", "b"):
        await store.create(session_id, "m")
    assert size(tmp_path / "s.db-wal") <= 16 * MB
    await store.close()
