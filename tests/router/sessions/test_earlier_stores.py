"""What an earlier version stored is read, and goes on; what it cannot read, it is never answered without.

`stored` has what earlier versions wrote, a SQLite file and the keys of a Redis server of each: `sessions` the one before
messages had parts, `responses` the one that kept each response with its whole conversation, `tenants` the one in which
ids of sessions were those of all tenants.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.router.faces.http.responses.kept import KeptResponses, _key
from ryzanstein.router.sessions.claimed import Claimed
from ryzanstein.router.sessions.claims import Holding
from ryzanstein.router.sessions.names import OwnedSessions
from ryzanstein.router.sessions.store import SessionBounds, SessionStore
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.sessions.turn import Turns
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.storage.redis_client import redis_client

STORED = Path(__file__).parent / "stored"
EARLIER = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, 'ü\n"quoted" ["user", 1]'),
    Message(Role.ASSISTANT, ""),
    Message(Role.USER, "more"),
    Message(Role.ASSISTANT, '{"role": "tool"}'),
)
PARTS = (
    Message(Role.USER, "weather?", name="ann"),
    Message(Role.ASSISTANT, "", (ToolCall("call_1", "weather", '{"city": "Köln"}'), ToolCall("2", "f", "{")), reasoning="hm"),
    Message(Role.TOOL, "sunny", tool_call_id="call_1"),
)

Opener = Callable[..., Awaitable[SessionStore]]


@pytest.fixture(params=["sqlite", "redis"])
async def reopen(request: pytest.FixtureRequest, start_redis: Any, tmp_path: Path) -> Any:
    """Opens the store that an earlier version wrote, as often as it is called."""
    opened: list[SessionStore] = []
    written = next((each for each in ("responses", "tenants") if each in request.node.name), "sessions")
    url = await _filled(await start_redis(), written) if request.param == "redis" else ""
    shutil.copy(STORED / f"{written}.db", tmp_path / "sessions.db")

    async def reopen(**most: int) -> SessionStore:
        store: SessionStore
        if url:
            store = await RedisSessions.open(redis_client(url), "test:", SessionBounds(**most), lambda count: None)
        else:
            store = await SqliteSessions.open(tmp_path / "sessions.db", SessionBounds(**most), lambda count: None)
        opened.append(store)
        return store

    yield reopen
    for store in opened:
        await store.close()


async def _filled(redis: Any, written: str) -> str:
    client = redis_client(redis.url)
    for key, value in json.loads((STORED / f"{written}.json").read_text()).items():
        if isinstance(value, list):
            await client.rpush(key, *value)
        elif "set" in value:
            await client.sadd(key, *value["set"])
        elif "sorted set" in value:
            await client.zadd(key, value["sorted set"])
        else:
            await client.hset(key, mapping=value)
    await client.aclose()
    return str(redis.url)


async def test_earlier_sessions_are_read_as_they_were_said(reopen: Opener) -> None:
    store = await reopen()
    session = await store.get("earlier")
    assert (session.messages, session.model, session.node_id) == (EARLIER, "m", "node-a")
    assert [(each.session_id, each.messages) for each in (await store.list()).sessions] == [("empty", ()), ("earlier", ())]
    assert not await store.append("earlier", EARLIER, model="m", node_id="b", generation_id="g1"), "this turn is there already"


async def test_an_earlier_session_goes_on_with_messages_of_more_parts(reopen: Opener) -> None:
    store = await reopen()
    await store.append("earlier", PARTS, model="m", node_id="b", generation_id="g2")
    assert (await store.get("earlier")).messages == (*EARLIER, *PARTS)
    assert (await (await reopen()).get("earlier")).messages == (*EARLIER, *PARTS)


async def test_earlier_responses_go_on_and_are_deleted(reopen: Opener) -> None:
    store, second = await reopen(), (Message(Role.USER, "q2"), Message(Role.ASSISTANT, "a2"))
    kept = KeptResponses(store, RouterTelemetry())
    asked = ((Role.USER, "q"), (Role.ASSISTANT, "a"))
    whole = tuple(Message(role, f"{text}{number}") for number in (0, 1) for role, text in asked)
    assert await kept.conversation("t", "resp_1", "previous_response_id") == whole
    assert (await kept.retrieve("t", "resp_1"))["usage"] == 7
    await kept.keep("t", {"id": "resp_2", "model": "m", "previous_response_id": "resp_1"}, second, whole)
    assert await kept.conversation("t", "resp_2", "previous_response_id") == (*whole, *second)
    for response_id in ("resp_0", "resp_1"):
        await kept.delete("t", response_id)
        with pytest.raises(RyzansteinError):
            await kept.retrieve("t", response_id)
    assert await kept.conversation("t", "resp_2", "previous_response_id") == (*whole, *second)
    await kept.delete("t", "resp_2")
    digest = _key("t", "resp_0").partition("-")[0]
    for number in range(3):
        with pytest.raises(RyzansteinError):
            await store.get(f"{digest}-resp_{number}")


async def test_earlier_responses_are_evicted_first_and_with_what_is_left_of_others(reopen: Opener) -> None:
    store = await reopen(max_responses=3, tenant_share=1)
    kept = KeptResponses(store, RouterTelemetry())
    digest = _key("t", "resp_0").partition("-")[0]
    for number in range(10, 13):
        message = (Message(Role.USER, "q"), Message(Role.ASSISTANT, "a"))
        await kept.keep("t", {"id": f"resp_{number}", "model": "m"}, message)
    for gone in ("resp_0", "resp_0.object", "resp_1", "resp_1.object", "resp_lost.object"):
        with pytest.raises(RyzansteinError):
            await store.get(f"{digest}-{gone}")
    assert (await kept.retrieve("t", "resp_12"))["id"] == "resp_12"


async def test_a_plain_message_is_stored_as_an_earlier_version_stores_it(tmp_path: Path, start_redis: Any) -> None:
    sqlite = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda count: None)
    url = (await start_redis()).url
    redis = await RedisSessions.open(redis_client(url), "test:", SessionBounds(), lambda count: None)
    for store in (sqlite, redis):
        await store.create("s", "m", (*EARLIER, PARTS[1]))
        await store.close()
    with sqlite3.connect(tmp_path / "s.db") as db:
        rows = db.execute("SELECT role, content FROM messages ORDER BY position").fetchall()
    client = redis_client(url)
    packed = [json.loads(each) for each in await client.lrange("test:messages:s", 0, -1)]
    await client.aclose()
    for stored in (rows, packed):
        assert [tuple(row) for row in stored[:-1]] == [(each.role.value, each.content) for each in EARLIER]
        assert stored[-1][0] not in {"system", "user", "assistant"}, "an earlier version fails on it, and loses no part of it"


async def test_sessions_of_tenants_stay_theirs(reopen: Opener) -> None:
    store = await reopen()
    owned = OwnedSessions(store)
    for tenant, own, foreign in (("acme", "acmes", "betas"), ("beta", "betas", "acmes")):
        assert (await owned.get(tenant, own)).messages[0].content == f"hello {own}"
        assert [each.session_id for each in (await owned.list(tenant, 0, "")).sessions] == [own]
        for unknown in (foreign, "nobodys"):
            with pytest.raises(RyzansteinError):
                await owned.get(tenant, unknown)
    assert [each.session_id for each in (await owned.list("", 0, "")).sessions] == ["nobodys"]
    with pytest.raises(RyzansteinError, match="already exists"):
        await owned.create("acme", "acmes", "m", (), fresh=False)
    assert not (await owned.create("beta", "acmes", "m", (), fresh=False)).messages
    assert (await owned.get("acme", "acmes")).messages
    await owned.delete("acme", "acmes")
    assert [each.session_id for each in (await owned.list("acme", 0, "")).sessions] == []


async def test_the_tenant_of_what_was_nobody_s_has_it_beside_its_tenants_sessions(reopen: Opener) -> None:
    owned = OwnedSessions(await reopen(), unowned_tenant="acme")
    assert (await owned.get("acme", "nobodys")).messages[0].content == "hello nobodys"
    with pytest.raises(RyzansteinError):
        await owned.get("beta", "nobodys")


async def test_a_turn_of_tenants_goes_on_where_their_session_was_stored(reopen: Opener) -> None:
    store, telemetry = await reopen(), RouterTelemetry()
    claimed = Claimed(store, "router", 6.0, _ask_nobody, telemetry.background)
    turns = Turns(store, SessionBounds(), telemetry, claimed, OwnedSessions(store))
    question = ChatPrompt((Message(Role.USER, "more"),))
    for tenant, num_messages in (("acme", 3), ("beta", 1)):
        request = GenerationRequest("m", question, SamplingParams(), session_id="acmes", tenant=tenant, tenant_named=True)
        continued, turn = await turns.open(request, f"g-{tenant}")
        assert turn is not None
        assert isinstance(continued.prompt, ChatPrompt)
        assert len(continued.prompt.messages) == num_messages
        await turn.ensure("m", tenant)
        await turn.commit(Message(Role.ASSISTANT, "hi"), "m", "node-a")
        turn.release()
        assert len((await OwnedSessions(store).get(tenant, "acmes")).messages) == num_messages + 1
    await claimed.close()


async def _ask_nobody(owner: str, session_id: str) -> Holding:
    return Holding.UNKNOWN
