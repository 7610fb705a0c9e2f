"""A kept response continues another one: it stores its own turn only, and what it needs stays as long as it does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.faces.http.responses import kept as kept_module
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.resilient.store import OutagePolicy, ResilientSessions
from ryzanstein.router.sessions.store import Session, SessionBounds, SessionStore, store_unavailable
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.storage.redis_client import redis_client

Opener = Callable[..., Awaitable[SessionStore]]
DIGEST = "0" * 16


def key(number: int) -> str:
    return f"{DIGEST}-resp_{number}"


def text(number: int) -> tuple[Message, ...]:
    return Message(Role.USER, f"q{number}"), Message(Role.ASSISTANT, f"a{number}")


async def chain(store: SessionStore, numbers: Sequence[int]) -> None:
    """Keeps responses of which each continues the one before."""
    for before, number in zip([None, *numbers], numbers, strict=False):
        await store.create(key(number), "m", text(number), parent="" if before is None else key(before))
        await store.create(key(number) + ".object", "m", text(number)[-1:])
        await asyncio.sleep(0.002)


async def found(store: SessionStore, session_id: str) -> bool:
    try:
        return not (await store.get(session_id)).deleted
    except RyzansteinError as error:
        if error.code is not Code.NOT_FOUND:
            raise
        return False


async def test_a_response_has_its_own_turn_and_names_what_it_continues(open_store: Opener) -> None:
    store = await open_store()
    await chain(store, [0, 1])
    first, second = [await store.get(key(number)) for number in (0, 1)]
    assert (first.parent, first.messages, second.parent, second.messages) == ("", text(0), key(0), text(1))
    for missing in ({"session_id": key(2), "parent": key(9)}, {"session_id": key(9) + ".object"}):
        with pytest.raises(RyzansteinError) as refused:
            await store.create(model="m", **missing)
        assert refused.value.resource == ("session", key(9))
        assert not await found(store, missing["session_id"])


async def test_what_is_deleted_stays_for_those_that_continue_it_and_goes_with_the_last(open_store: Opener) -> None:
    store = await open_store()
    await chain(store, [0, 1, 2])
    await store.create(key(3), "m", text(3), parent=key(1))
    for number in (1, 0):
        await store.delete(key(number))
        with pytest.raises(RyzansteinError):
            await store.delete(key(number))
        with pytest.raises(RyzansteinError):
            await store.create(key(9), "m", text(9), parent=key(number))
    kept = await store.get(key(1))
    assert (kept.deleted, kept.messages, kept.parent) == (True, text(1), key(0))
    await store.delete(key(2))
    assert (await store.get(key(0))).deleted, "another one continues it"
    await store.delete(key(3))
    for number in range(4):
        for end in ("", ".object"):
            with pytest.raises(RyzansteinError):
                await store.get(key(number) + end)


async def test_eviction_takes_the_chain_that_was_used_least_recently_from_its_end(open_store: Opener) -> None:
    evicted: list[int] = []
    store = await open_store(evicted, max_responses=11, tenant_share=1)
    await chain(store, [0, 1])
    await chain(store, [10, 11])
    await store.create(key(2), "m", text(2), parent=key(0))  # the older chain is used again, from its beginning
    await chain(store, [20, 21])
    kept = [number for number in (0, 1, 2, 10, 11, 20, 21) if await found(store, key(number))]
    assert kept == [0, 2, 10, 11, 20, 21], "a branch that nobody used; its beginning stays for the other branch"
    await chain(store, [30, 31])
    kept = [number for number in (0, 2, 10, 11, 20, 21, 30, 31) if await found(store, key(number))]
    assert kept == [0, 2, 20, 21, 30, 31]
    assert sum(evicted) == 3
    for number in kept:
        parent = (await store.get(key(number))).parent
        assert not parent or await found(store, parent)


async def test_the_answer_is_a_leaf_again_when_what_continued_it_is_deleted(open_store: Opener) -> None:
    store = await open_store(max_responses=4, tenant_share=1)
    await chain(store, [0, 1])
    await store.delete(key(1))
    await chain(store, [10, 11])
    assert [number for number in (0, 10, 11) if await found(store, key(number))] == [10, 11]


async def scripted(store: SessionStore, seed: int) -> list[str]:
    """Keeps, continues and deletes responses at random, and returns what is there now and then."""
    chance, names, seen = random.Random(seed), [key(0)], []
    await store.create(key(0), "m", text(0))
    for number in range(1, 151):
        which, parent = chance.random(), chance.choice(names[-8:])
        with contextlib.suppress(RyzansteinError):
            if which < 0.25:
                await store.delete(parent)
            else:
                await store.create(key(number), "m", text(number), parent=parent if which < 0.8 else "")
                names.append(key(number))
                await store.create(key(number) + ".object", "m", text(number))
        if number % 15 == 0:
            seen.append(" ".join([name for name in names if await found(store, name)]))
    for name in seen[-1].split():
        parent = name
        while parent := (await store.get(parent)).parent:
            assert parent in names
    return seen


@pytest.mark.parametrize("seed", range(3))
async def test_all_stores_keep_and_evict_alike_and_no_response_is_without_its_history(
    seed: int, start_redis: Any, tmp_path: Path
) -> None:
    bounds = SessionBounds(max_responses=24, tenant_share=1)
    stores: list[SessionStore] = [
        MemorySessions(bounds, lambda count: None),
        await SqliteSessions.open(tmp_path / "s.db", bounds, lambda count: None),
        await RedisSessions.open(redis_client((await start_redis()).url), "test:", bounds, lambda count: None),
    ]
    memory, sqlite, redis = [await scripted(store, seed) for store in stores]
    for store in stores:
        await store.close()
    assert memory == sqlite == redis


async def test_a_claimed_session_is_never_evicted(open_store: Opener) -> None:
    store = await open_store(max_sessions=2)
    await store.create("claimed", "m")
    await store.claim(ClaimRequest("claimed", "g", "r", 60.0))
    for session_id in ("a", "b", "c"):
        await asyncio.sleep(0.002)
        await store.create(session_id, "m")
    assert "claimed" in {each.session_id for each in (await store.list()).sessions}


async def conversation(store: SessionStore, length: int) -> KeptResponses:
    kept = KeptResponses(store, RouterTelemetry())
    history: tuple[Message, ...] = ()
    for number in range(length):
        response = {"id": f"resp_{number}", "model": "m", "previous_response_id": f"resp_{number - 1}" if number else None}
        await kept.keep("t", response, text(number), history)
        history = await kept.conversation("t", f"resp_{number}", "previous_response_id")
    return kept


async def test_twelve_chained_turns_are_stored_once(tmp_path: Path) -> None:
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    kept = await conversation(store, 12)
    whole = tuple(message for number in range(12) for message in text(number))
    assert await kept.conversation("t", "resp_11", "previous_response_id") == whole
    assert len(await kept.input_items("t", "resp_11")) == 23
    await store.close()
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        count = "SELECT count(*) FROM messages WHERE role != 'continues' AND session_id {} GLOB '*.object'"
        counts = [db.execute(count.format(which)).fetchone()[0] for which in ("NOT", "")]
    assert counts == [24, 12], "messages of conversations, and objects; versions without parents: 156 and 12"


async def test_a_conversation_whose_beginning_goes_while_it_is_continued_is_stored_whole(open_store: Opener) -> None:
    store = await open_store()
    kept = await conversation(store, 2)
    history = await kept.conversation("t", "resp_1", "previous_response_id")
    await kept.delete("t", "resp_1")
    await kept.keep("t", {"id": "resp_2", "model": "m", "previous_response_id": "resp_1"}, text(2), history)
    assert await kept.conversation("t", "resp_2", "previous_response_id") == (*text(0), *text(1), *text(2))


async def test_a_chain_that_lost_its_beginning_is_refused_and_never_continued_without_it() -> None:
    store = MemorySessions(SessionBounds(), lambda count: None)
    kept = await conversation(store, 3)
    store._responses.kept.pop(next(each for each in store._responses.kept if each.endswith("resp_0")))
    with pytest.raises(RyzansteinError, match="continues a response that is not stored any more") as refused:
        await kept.conversation("t", "resp_2", "previous_response_id")
    assert (refused.value.code, refused.value.reason) == (Code.NOT_FOUND, "RESPONSE_NOT_FOUND")
    assert refused.value.violations[0].field == "previous_response_id"


class Away(MemorySessions):
    """A store that fails while it is `away`."""

    away = False

    async def get(self, session_id: str) -> Session:
        self._fail()
        return await super().get(session_id)

    async def delete(self, session_id: str) -> None:
        self._fail()
        await super().delete(session_id)

    async def claim(self, request: ClaimRequest) -> None:
        self._fail()

    def _fail(self) -> None:
        if self.away:
            raise store_unavailable("away")


async def test_what_is_deleted_while_the_store_is_away_is_gone_and_still_continued(until: Any) -> None:
    store, telemetry = Away(SessionBounds(), lambda count: None), RouterTelemetry()
    resilient = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    kept = await conversation(resilient, 2)
    for away in (True, False):
        if away:
            store.away = True
            await kept.delete("t", "resp_0")
        with pytest.raises(RyzansteinError) as refused:
            await kept.conversation("t", "resp_0", "previous_response_id")
        assert refused.value.code is Code.NOT_FOUND
        assert await kept.conversation("t", "resp_1", "previous_response_id") == (*text(0), *text(1))
        store.away = False
        await until(lambda: telemetry.store_outage._value.get() == 0)
    await resilient.close()


async def test_a_chain_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MOST_TURNS", 3)
    store = MemorySessions(SessionBounds(), lambda count: None)
    kept = await conversation(store, 3)
    await kept.keep("t", {"id": "resp_3", "model": "m", "previous_response_id": "resp_2"}, text(3))
    with pytest.raises(RyzansteinError) as refused:
        await kept.conversation("t", "resp_3", "previous_response_id")
    assert refused.value.reason == "SESSION_FULL"


async def test_a_router_of_the_version_before_beside_this_one_keeps_responses_that_go_on(tmp_path: Path) -> None:
    """It has the file open while this one updates the schema, and fails on a chain rather than read a part of it."""
    store = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as db:
        db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, '')", (key(0), "m", 1.0, 1.0))
        await store.create(key(1), "m", text(1), parent=key(0))
        kinds = [kind for (kind,) in db.execute("SELECT role FROM messages WHERE session_id = ? ORDER BY position", (key(1),))]
    assert kinds == ["continues", "user", "assistant"]
    with pytest.raises(ValueError, match="continues"):
        Role(kinds[0])
    await store.close()
