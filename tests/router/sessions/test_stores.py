"""Both stores behave alike; the SQLite one also survives."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import Message, Role
from ryzanstein.router.sessions.memory import MemorySessions
from ryzanstein.router.sessions.sqlite import SCHEMA_VERSION, SqliteSessions
from ryzanstein.router.sessions.store import SessionBounds, SessionStore

Opener = Callable[..., Awaitable[SessionStore]]
HELLO = (Message(Role.USER, "hello"), Message(Role.ASSISTANT, "hi"))


@pytest.fixture(params=["memory", "sqlite"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    opened: list[SessionStore] = []

    async def open_store(evicted: list[int] | None = None, **bounds: int) -> SessionStore:
        told = [] if evicted is None else evicted
        store: SessionStore
        if request.param == "memory":
            store = MemorySessions(SessionBounds(**bounds), told.append)
        else:
            store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(**bounds), told.append)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        await store.close()


async def test_a_session_is_what_was_created_and_appended(open_store: Opener) -> None:
    store = await open_store()
    created = await store.create("s", "", HELLO)
    assert (created.messages, created.model, created.node_id) == (HELLO, "", "")
    more = (Message(Role.USER, "ü\n"), Message(Role.ASSISTANT, ""))
    await store.append("s", more, model="m", node_id="a")
    session = await store.get("s")
    assert session.messages == (*HELLO, *more)
    assert (session.model, session.node_id, session.create_time) == ("m", "a", created.create_time)
    assert session.update_time >= created.update_time


async def test_the_model_of_a_session_stays(open_store: Opener) -> None:
    store = await open_store()
    await store.create("s", "m")
    await store.append("s", HELLO, model="other", node_id="a")
    assert (await store.get("s")).model == "m"


@pytest.mark.parametrize("action", ["get", "delete", "append"])
async def test_an_unknown_session_is_not_found(open_store: Opener, action: str) -> None:
    store = await open_store()
    calls = {
        "get": lambda: store.get("s"),
        "delete": lambda: store.delete("s"),
        "append": lambda: store.append("s", HELLO, model="m", node_id="a"),
    }
    with pytest.raises(RyzansteinError) as failure:
        await calls[action]()
    assert (failure.value.code, failure.value.resource) == (Code.NOT_FOUND, ("session", "s"))


async def test_an_id_is_taken_once_until_it_is_deleted(open_store: Opener) -> None:
    store = await open_store()
    await store.create("s", "m", HELLO)
    with pytest.raises(RyzansteinError) as failure:
        await store.create("s", "m")
    assert failure.value.code is Code.ALREADY_EXISTS
    await store.delete("s")
    assert (await store.create("s", "m")).messages == ()


async def test_pages_list_every_session_once_the_last_used_first(open_store: Opener) -> None:
    store = await open_store()
    for i in range(7):
        await store.create(f"s{i}", "m", HELLO)
        await asyncio.sleep(0.002)
    await store.append("s2", HELLO, model="m", node_id="a")
    pages, token = [], ""
    while True:
        page = await store.list(3, token)
        pages.append([session.session_id for session in page.sessions])
        assert all(session.messages == () for session in page.sessions)
        token = page.next_page_token
        if not token:
            break
    assert pages == [["s2", "s6", "s5"], ["s4", "s3", "s1"], ["s0"]]


@pytest.mark.parametrize(("page_size", "page_token"), [(1001, ""), (-1, ""), (0, "?"), (0, "eA==")])
async def test_a_page_that_cannot_be_is_refused(open_store: Opener, page_size: int, page_token: str) -> None:
    store = await open_store()
    with pytest.raises(RyzansteinError) as failure:
        await store.list(page_size, page_token)
    assert failure.value.code is Code.INVALID_ARGUMENT
    assert failure.value.violations[0].field in ("page_size", "page_token")


@pytest.mark.parametrize("session_id", ["", "x" * 129])
async def test_an_id_out_of_bounds_is_refused(open_store: Opener, session_id: str) -> None:
    store = await open_store()
    with pytest.raises(RyzansteinError) as failure:
        await store.create(session_id, "m")
    assert failure.value.violations[0].field == "session_id"


@pytest.mark.parametrize("bounds", [{"max_messages": 1}, {"max_chars": 6}])
async def test_a_session_that_would_be_too_long_is_refused(open_store: Opener, bounds: dict[str, int]) -> None:
    store = await open_store(**bounds)
    with pytest.raises(RyzansteinError) as failure:
        await store.create("s", "m", HELLO)
    assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "SESSION_FULL")


async def test_above_the_bound_the_least_recently_used_session_is_evicted_and_told(open_store: Opener) -> None:
    evicted: list[int] = []
    store = await open_store(evicted, max_sessions=2)
    await store.create("old", "m")
    await asyncio.sleep(0.002)
    await store.create("idle", "m")
    await asyncio.sleep(0.002)
    await store.append("old", HELLO, model="m", node_id="a")
    await store.create("new", "m")
    assert {session.session_id for session in (await store.list()).sessions} == {"old", "new"}
    assert evicted == [1]


async def test_a_sqlite_session_survives_a_restart(tmp_path: Path) -> None:
    store = await SqliteSessions.open(tmp_path / "deep" / "s.db", SessionBounds(), lambda count: None)
    await store.create("s", "m", HELLO)
    before = await store.get("s")
    await store.close()
    again = await SqliteSessions.open(tmp_path / "deep" / "s.db", SessionBounds(), lambda count: None)
    assert await again.get("s") == before
    await again.close()


async def test_a_deleted_sqlite_session_leaves_no_message_behind(tmp_path: Path) -> None:
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    await store.create("s", "m", HELLO)
    await store.delete("s")
    await store.close()
    with sqlite3.connect(tmp_path / "s.db") as db:
        left = db.execute("SELECT count(*) FROM messages").fetchone()
    db.close()
    assert left == (0,)


async def test_a_file_of_a_later_version_is_refused_and_kept(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(RyzansteinError, match="schema 2, this router knows 1"):
        await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"not a database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
