"""All stores behave alike; those outside the process also survive it, and are shared."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.auth.caller import tenant_digest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.sessions.claimed import Claimed
from ryzanstein.router.sessions.claims import ClaimRequest, Holding, SessionBusyError
from ryzanstein.router.sessions.store import SessionBounds, SessionStore
from ryzanstein.router.sessions.stores import sqlite
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.sessions.stores.sqlite_file import SCHEMA_VERSION
from ryzanstein.router.sessions.turn import Turns
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.storage.redis_client import redis_client

Opener = Callable[..., Awaitable[SessionStore]]
HELLO = (Message(Role.USER, "hello"), Message(Role.ASSISTANT, "hi"))


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


@pytest.mark.parametrize("session_id", ["", "x" * 147])
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


async def test_above_the_bound_the_least_recently_used_session_is_evicted_and_counted(open_store: Opener) -> None:
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


async def test_a_generations_turn_is_added_once_however_often_it_is_appended(open_store: Opener) -> None:
    store = await open_store()
    await store.create("s", "m")
    for generation_id in ("g", "g", "h", "g"):
        await store.append("s", HELLO, model="m", node_id="a", generation_id=generation_id)
    assert (await store.get("s")).messages == (*HELLO, *HELLO)
    await store.delete("s")
    await store.create("s", "m")
    await store.append("s", HELLO, model="m", node_id="a", generation_id="g")
    assert (await store.get("s")).messages == HELLO


class Written:
    """A store that has written everything."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def unwritten(self, session_id: str) -> bool:
        return False


async def refused_as_busy(claim: Awaitable[None]) -> None:
    with pytest.raises(RyzansteinError) as failure:
        await claim
    assert (failure.value.code, failure.value.reason, failure.value.retry_after_s) == (Code.ABORTED, "SESSION_BUSY", 1.0)


async def test_a_claimed_session_is_busy_for_every_other_generation_until_it_is_released(open_store: Opener) -> None:
    store = await open_store()
    await store.claim(ClaimRequest("s", "g", "r1", 60.0))
    await store.claim(ClaimRequest("s", "g", "r1", 60.0))
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r1", 60.0)))
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0)))
    await store.claim(ClaimRequest("other", "h", "r2", 60.0))
    await store.release("s", "g", "r2")
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0)))
    await store.release("s", "g", "r1")
    await store.claim(ClaimRequest("s", "h", "r2", 60.0))


async def test_a_claim_of_an_owner_that_is_gone_is_no_obstacle_to_one_other(open_store: Opener) -> None:
    store = await open_store()
    await store.claim(ClaimRequest("s", "g", "dead", 60.0))
    with pytest.raises(SessionBusyError) as busy:
        await store.claim(ClaimRequest("s", "h", "r2", 60.0))
    assert (busy.value.generation_id, busy.value.owner) == ("g", "dead")
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0, gone="somebody else")))
    await store.claim(ClaimRequest("s", "h", "r2", 60.0, gone="dead"))
    await refused_as_busy(store.claim(ClaimRequest("s", "i", "r3", 60.0, gone="dead")))
    assert await store.renew({"s": "g"}, "dead", 60.0) == {"s"}


@pytest.mark.parametrize("expired", [False, True])
async def test_whose_claims_are_in_the_way_of_a_router(open_store: Opener, expired: bool) -> None:
    store = Written(await open_store())
    for owner in (*Holding, "me"):
        await store.claim(ClaimRequest(f"{owner}", "g", f"{owner}", 0.01 if expired else 60.0))
    await asyncio.sleep(0.02)
    asked = []

    async def ask(owner: str, session_id: str) -> Holding:
        assert owner == session_id
        asked.append(owner)
        return next(holding for holding in Holding if f"{holding}" == owner)

    claimed = Claimed(store, "me", 60.0, ask, RouterTelemetry().background)
    free = {Holding.GONE, Holding.FREE, Holding.UNKNOWN} if expired else {Holding.GONE}
    for holding in Holding:
        if holding in free:
            await claimed.claim(f"{holding}", "h")
            await refused_as_busy(claimed.claim(f"{holding}", "i"))
            assert claimed.holds(f"{holding}")
        else:
            await refused_as_busy(claimed.claim(f"{holding}", "h"))
            assert not claimed.holds(f"{holding}")
    await claimed.claim("me", "h")
    assert asked == [f"{holding}" for holding in Holding]
    await claimed.close()


async def test_an_expired_claim_that_its_owner_renewed_meanwhile_is_not_replaced(open_store: Opener) -> None:
    store = Written(await open_store())
    await store.claim(ClaimRequest("s", "g", "other", 0.01))
    await asyncio.sleep(0.02)

    async def ask(owner: str, session_id: str) -> Holding:
        await store.claim(ClaimRequest(session_id, "next", owner, 60.0, expired_of=owner))
        return Holding.FREE

    claimed = Claimed(store, "me", 60.0, ask, RouterTelemetry().background)
    await refused_as_busy(claimed.claim("s", "h"))
    assert await store.renew({"s": "h"}, "me", 60.0) == {"s"}
    await claimed.close()


async def test_a_claim_is_not_renewed_before_it_is_taken(open_store: Opener) -> None:
    """The owner of an expired claim, which has a turn to write, is being asked when this router renews its other claims."""

    class TemplateInput(Written):
        async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> set[str]:
            lost = await self._store.renew(held, owner, ttl_s)
            renewed.set()
            return lost

    async def ask(owner: str, session_id: str) -> Holding:
        renewed.clear()
        async with asyncio.timeout(20):
            await renewed.wait()
        return Holding.HELD

    renewed, store = asyncio.Event(), TemplateInput(await open_store())
    await store.claim(ClaimRequest("s", "g", "other", 0.01))
    await asyncio.sleep(0.02)
    claimed = Claimed(store, "me", 0.3, ask, RouterTelemetry().background)
    await claimed.claim("mine", "h")
    await refused_as_busy(claimed.claim("s", "h"))
    with pytest.raises(SessionBusyError) as busy:
        await store.claim(ClaimRequest("s", "i", "third", 60.0))
    assert (busy.value.owner, busy.value.expired) == ("other", True)
    await claimed.close()


async def test_a_turn_that_is_stored_during_a_renewal_leaves_no_claim(open_store: Opener) -> None:
    """The renewal has read what is held, and reaches the store after the turn that ended the claim."""

    class Slow(Written):
        async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> set[str]:
            renewing.set()
            await asyncio.sleep(0.1)
            return await self._store.renew(held, owner, ttl_s)

    async def ask(owner: str, session_id: str) -> Holding:
        raise AssertionError("nobody else has a claim")

    renewing, store = asyncio.Event(), Slow(await open_store())
    claimed = Claimed(store, "me", 0.3, ask, RouterTelemetry().background)
    turns = Turns(store, SessionBounds(), RouterTelemetry(), claimed)
    request = GenerationRequest("m", ChatPrompt((Message(Role.USER, "x"),)), SamplingParams(), session_id="s")
    _, turn = await turns.open(request, "g")
    assert turn is not None
    await turn.ensure("m")
    await renewing.wait()
    await turn.commit(Message(Role.ASSISTANT, "y"), "m", "node")
    await asyncio.sleep(0.25)  # longer than the renewal takes, and than the next one waits
    await store.claim(ClaimRequest("s", "h", "other", 60.0))
    turn.release()
    await claimed.close()


async def test_a_claim_passes_to_the_owner_that_takes_the_generation_over(open_store: Opener) -> None:
    store = await open_store()
    await store.claim(ClaimRequest("s", "g", "r1", 60.0))
    await store.claim(ClaimRequest("s", "g", "r2", 60.0))
    assert await store.renew({"s": "g"}, "r1", 60.0) == {"s"}
    await store.release("s", "g", "r1")
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r3", 60.0)))


async def test_a_claim_ends_with_its_time_unless_it_is_renewed(open_store: Opener) -> None:
    store = await open_store()
    await store.claim(ClaimRequest("s", "g", "r1", 0.3))
    await store.claim(ClaimRequest("kept", "g", "r1", 0.3))
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert not await store.renew({"kept": "g"}, "r1", 0.3)
    await refused_as_busy(store.claim(ClaimRequest("kept", "h", "r2", 60.0, expired_of="r1")))
    with pytest.raises(SessionBusyError) as busy:
        await store.claim(ClaimRequest("s", "h", "r2", 60.0))
    assert (busy.value.generation_id, busy.value.owner, busy.value.expired) == ("g", "r1", True)
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0, expired_of="somebody else")))
    await store.claim(ClaimRequest("s", "h", "r2", 60.0, expired_of="r1"))
    assert await store.renew({"s": "g", "kept": "g"}, "r1", 60.0) == {"s"}


async def test_a_renewal_takes_again_what_nobody_has(open_store: Opener) -> None:
    store = await open_store()
    assert not await store.renew({"s": "g"}, "r1", 60.0)
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0)))


async def test_a_stored_turn_ends_the_claim_of_its_generation_and_of_no_other(open_store: Opener) -> None:
    store = await open_store()
    await store.create("s", "m")
    await store.claim(ClaimRequest("s", "g", "r1", 60.0))
    await store.append("s", HELLO, model="m", node_id="a", generation_id="late")
    await refused_as_busy(store.claim(ClaimRequest("s", "h", "r2", 60.0)))
    await store.append("s", HELLO, model="m", node_id="a", generation_id="g")
    await store.claim(ClaimRequest("s", "h", "r2", 60.0))
    assert not await store.renew({"s": "h"}, "r2", 60.0), "it has the claim"


async def test_of_many_who_claim_at_once_one_wins(open_store: Opener) -> None:
    store = await open_store()
    claims = [store.claim(ClaimRequest("s", f"g{i}", f"r{i % 3}", 60.0)) for i in range(20)]
    refusals = [error for error in await asyncio.gather(*claims, return_exceptions=True) if error is not None]
    assert len(refusals) == 19
    assert {getattr(error, "reason", error) for error in refusals} == {"SESSION_BUSY"}


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
    with pytest.raises(RyzansteinError, match=f"version {SCHEMA_VERSION + 1}, the newest supported is {SCHEMA_VERSION}"):
        await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)


VERSION_1 = """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, model TEXT NOT NULL,
    create_time REAL NOT NULL, update_time REAL NOT NULL, node_id TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (update_time, session_id);
CREATE TABLE messages (
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, position INTEGER NOT NULL,
    role TEXT NOT NULL, content TEXT NOT NULL, PRIMARY KEY (session_id, position)
) WITHOUT ROWID;
INSERT INTO sessions VALUES ('s', 'm', 1.0, 2.0, 'a');
INSERT INTO messages VALUES ('s', 0, 'user', 'hello');
PRAGMA user_version = 1;
"""


async def test_a_file_of_the_version_before_is_taken_along(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.executescript(VERSION_1)
    db.close()
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    await store.append("s", HELLO, model="m", node_id="a", generation_id="g")
    assert (await store.get("s")).messages == (Message(Role.USER, "hello"), *HELLO)
    await store.close()


async def test_two_stores_on_one_file_see_each_others_claims_and_turns(tmp_path: Path) -> None:
    one, other = [await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None) for _ in range(2)]
    await one.create("s", "m")
    await one.claim(ClaimRequest("s", "g", "r1", 60.0))
    await refused_as_busy(other.claim(ClaimRequest("s", "h", "r2", 60.0)))
    await one.append("s", HELLO, model="m", node_id="a", generation_id="g")
    await other.append("s", HELLO, model="m", node_id="a", generation_id="g")
    assert (await other.get("s")).messages == HELLO
    await other.claim(ClaimRequest("s", "h", "r2", 60.0))
    await one.close()
    await other.close()


def damaged_in_the_middle(path: Path) -> bytes:
    """Pages of a real database, overwritten."""
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
        db.executemany("INSERT INTO messages VALUES ('s', ?, 'user', ?)", [(i + 1, "x" * 500) for i in range(200)])
    db.close()
    content = bytearray(path.read_bytes())
    content[4096 * 4 : 4096 * 12] = b"\xa5" * (4096 * 8)
    return bytes(content)


def damaged(path: Path, damage: str) -> bytes:
    """What is at fault in a real database. The names in a schema and its version are the smallest parts that may be."""
    if damage == "no database":
        return b"not a database" * 100
    if damage in ("overwritten", "cut"):
        return damaged_in_the_middle(path)[: 4096 * 10 + 100 if damage == "cut" else None]
    with sqlite3.connect(path) as db:
        db.executescript(VERSION_1)
    db.close()
    content = bytearray(path.read_bytes())
    if damage == "no text":
        at = content.index(b"CREATE TABLE messages")
        content[at + 7 : at + 12] = b"\xff" * 5
    else:
        content[60:64] = bytes(4)  # PRAGMA user_version
    return bytes(content)


@pytest.mark.parametrize("damage", ["no database", "overwritten", "cut", "no text", "version"])
async def test_a_damaged_file_is_refused_by_name_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s.db"
    content = damaged(path, damage)
    path.write_bytes(content)
    with pytest.raises(RyzansteinError) as failure:
        await SqliteSessions.open(path, SessionBounds(), lambda count: None)
    assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "STATE_CORRUPT")
    assert str(path) in failure.value.message
    assert path.read_bytes() == content


async def test_a_message_that_cannot_be_read_refuses_its_session_alone(tmp_path: Path) -> None:
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    for session_id in ("role", "text", "name", "whole"):
        await store.create(session_id, "m", HELLO)
    await store.close()
    with sqlite3.connect(tmp_path / "s.db") as db:
        db.execute("UPDATE messages SET role = 'ucer' WHERE session_id = 'role' AND position = 0")
        db.execute("UPDATE messages SET content = CAST(x'ff68' AS TEXT) WHERE session_id = 'text' AND position = 0")
        db.execute("UPDATE sessions SET model = CAST(x'ff68' AS TEXT) WHERE session_id = 'name'")
    db.close()
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    for session_id in ("role", "text"):
        with pytest.raises(RyzansteinError) as failure:
            await store.get(session_id)
        assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "SESSION_DAMAGED")
    assert {each.session_id for each in (await store.list()).sessions} == {"role", "text", "name", "whole"}
    assert (await store.get("whole")).messages == (await store.get("name")).messages == HELLO
    await store.delete("role")
    await store.close()


async def test_a_new_session_is_not_evicted_for_its_time_by_a_clock_that_was_set_back(
    tmp_path: Path, start_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds, client = SessionBounds(max_sessions=2), redis_client((await start_redis()).url)
    stores: tuple[SessionStore, ...] = (
        await SqliteSessions.open(tmp_path / "s.db", bounds, lambda count: None),
        await RedisSessions.open(client, "test:", bounds, lambda count: None),
    )
    later = time.time() + 3600.0
    with monkeypatch.context() as ahead:
        ahead.setattr(sqlite.time, "time", lambda: later)
        for store in stores:
            for session_id in ("a", "b"):
                await store.create(session_id, "m")
    await client.zadd("test:sessions", {"a": later, "b": later + 1})
    for store in stores:
        await store.create("new", "m", HELLO)
        assert (await store.get("new")).messages == HELLO
        await store.get("b")
        with pytest.raises(RyzansteinError):
            await store.get("a")
        await store.close()


async def test_a_claimed_session_is_not_evicted_and_the_next_one_is(open_store: Opener) -> None:
    evicted: list[int] = []
    store = await open_store(evicted, max_sessions=3)
    for session_id in "abcde":
        await store.create(session_id, "m", HELLO)
        if session_id in "ab":
            await store.claim(ClaimRequest(session_id, "g", "r", 60.0))
    assert [each.session_id for each in (await store.list()).sessions] == ["e", "b", "a"]
    assert evicted == [1, 1]


@pytest.mark.parametrize("change", ["claim", "renew", "release"])
async def test_the_claim_of_a_dead_router_is_not_kept_for_ever(tmp_path: Path, change: str) -> None:
    path = tmp_path / "s.db"
    store = await SqliteSessions.open(path, SessionBounds(), lambda count: None)
    await store.claim(ClaimRequest("s", "g", "dead", 6.0))
    if change != "claim":
        await store.claim(ClaimRequest("t", "g", "r", 6.0))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE claims SET taken_at = taken_at - 3607 WHERE owner = 'dead'")
    db.close()
    if change == "claim":
        await store.claim(ClaimRequest("t", "g", "r", 6.0))
    elif change == "renew":
        await store.renew({"t": "g"}, "r", 6.0)
    else:
        await store.release("t", "g", "r")
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM claims WHERE owner = 'dead'").fetchone() == (0,)
    db.close()
    await store.close()


async def test_a_session_belongs_to_the_tenant_that_it_was_created_for(open_store: Opener) -> None:
    store = await open_store()
    for session_id, tenant in (("a", "acme"), ("b", "beta"), ("c", ""), ("d", "acme")):
        await store.create(session_id, "m", HELLO, tenant=tenant)
        await store.append(session_id, HELLO, model="m", node_id="n")
    assert [(await store.get(each)).tenant for each in "abcd"] == ["acme", "beta", "", "acme"]

    async def listed(tenant: str, size: int = 0) -> list[str]:
        found, token = [], ""
        for _ in range(9):
            page = await store.list(size, token, tenant=tenant)
            assert {each.tenant for each in page.sessions} <= {tenant}
            found += [each.session_id for each in page.sessions]
            token = page.next_page_token
            if not token:
                return found
        raise AssertionError("no end")

    for size in (0, 1, 3):
        assert (await listed("acme", size), await listed("gamma", size)) == (["d", "a"], [])
        assert await listed("", size) == ["c"]
    assert [await store.owner(each) for each in "abce"] == ["acme", "beta", "", None]


async def test_what_is_kept_of_responses_is_not_listed_and_has_a_bound_of_its_own(open_store: Opener) -> None:
    evicted: list[int] = []
    store = await open_store(evicted, max_sessions=2, max_responses=3)
    responses = [f"{number:016x}-resp_{number}" + end for number in range(2) for end in ("", ".object")]
    for session_id in ("a", *responses[:2], "b", *responses[2:]):
        await store.create(session_id, "m", HELLO)
    assert evicted == [1], "with its object"
    for gone in responses[:2]:
        with pytest.raises(RyzansteinError):
            await store.get(gone)
    assert [each.session_id for each in (await store.list(1)).sessions] == ["b"]
    assert [each.session_id for each in (await store.list()).sessions] == ["b", "a"]
    await store.create("c", "m")
    assert [each.session_id for each in (await store.list()).sessions] == ["c", "b"]
    assert (await store.get(responses[3])).messages == HELLO
    await store.create(responses[0], "m", HELLO)
    assert sum(evicted) == 2


async def test_a_tenant_above_its_share_evicts_its_own(open_store: Opener) -> None:
    evicted: list[int] = []
    store = await open_store(evicted, max_sessions=8, max_responses=8)
    for session_id, tenant in (("old", "beta"), ("nobody", "")):
        await store.create(session_id, "m", HELLO, tenant=tenant)
    await store.create(f"{tenant_digest('beta')}-resp_old", "m", HELLO)
    for number in range(20):
        await store.create(f"s{number}", "m", HELLO, tenant="acme")
        await store.create(f"{tenant_digest('acme')}-resp_{number}", "m", HELLO)
    acmes = [each.session_id for each in (await store.list(tenant="acme")).sessions]
    assert acmes == ["s19", "s18", "s17", "s16"]
    for kept in ("old", "nobody", f"{tenant_digest('beta')}-resp_old", f"{tenant_digest('acme')}-resp_19"):
        assert (await store.get(kept)).messages == HELLO
    with pytest.raises(RyzansteinError):
        await store.get(f"{tenant_digest('acme')}-resp_9")
    assert sum(evicted) >= 16 + 15


async def test_a_tenant_keeps_as_many_sessions_as_its_limit(open_store: Opener) -> None:
    store = await open_store(max_sessions=100, most_sessions_of=lambda tenant: 2 if tenant == "acme" else None)
    for number in range(5):
        for tenant in ("acme", "beta"):
            await store.create(f"{tenant}-{number}", "m", HELLO, tenant=tenant)
    assert [each.session_id for each in (await store.list(tenant="acme")).sessions] == ["acme-4", "acme-3"]
    assert len((await store.list(tenant="beta")).sessions) == 5


async def test_without_tenants_there_are_no_shares(open_store: Opener) -> None:
    store = await open_store(max_sessions=8, max_responses=8)
    for number in range(8):
        await store.create(f"s{number}", "m", HELLO)
        await store.create(f"{tenant_digest('')}-resp_{number}", "m", HELLO)
    assert len((await store.list()).sessions) == 8
    assert (await store.get(f"{tenant_digest('')}-resp_0")).messages == HELLO
