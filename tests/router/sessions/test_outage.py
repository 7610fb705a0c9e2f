"""The session store fails in the middle of conversations: locked, full, killed, frozen. No answer fails, no turn is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.router.sessions.claims import ClaimRequest, SessionBusyError
from ryzanstein.router.sessions.resilient.store import OutagePolicy, ResilientSessions
from ryzanstein.router.sessions.store import Session, SessionBounds, store_unavailable
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.redis import RedisSessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.storage.redis_client import redis_client
from ryzanstein.v1 import inference_pb2 as inference

ANSWER = "0.0 0.1 "
_LOCK = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def chat(text: str, session_id: str = "s") -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content=text)],
        sampling=inference.SamplingParams(max_tokens=2),
        session_id=session_id,
    )


def sent(node: Any) -> list[str]:
    """What the last request consisted of."""
    return [message.content for message in node.submits[-1].messages.messages]


def conversation(*wording: str) -> list[str]:
    return [text for words in wording for text in (words, ANSWER)]


async def contents(client: Any, session_id: str = "s") -> list[str]:
    session = (await client.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return [message.content for message in session.messages]


async def refused(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


def in_file(path: Path, session_id: str = "s") -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT content FROM messages WHERE session_id = ? ORDER BY position", (session_id,))
        return [content for (content,) in rows]


@contextlib.asynccontextmanager
async def locked_by_another_process(path: Path) -> AsyncIterator[None]:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _LOCK, str(path), **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"locked\n"
    try:
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def test_a_file_that_another_process_locks_delays_no_conversation_and_gets_every_turn(
    start_node: Any, start_router: Any, until: Any, tmp_path: Path
) -> None:
    node = await start_node("a")
    client = await start_router(node, session_store="sqlite")
    await client.inference.Chat(chat("one"))
    async with locked_by_another_process(tmp_path / "sessions.db"):
        began = time.monotonic()
        await client.inference.Chat(chat("two"))
        assert time.monotonic() - began < 2.0
        await client.inference.Chat(chat("three"))
        await client.inference.Chat(chat("hi", session_id="another"))
        assert sent(node) == ["hi"]
        assert (client.value("store_outage"), client.value("store_outages_total")) == (1, 1)
        assert client.value("store_backlog") == 4
        assert await contents(client) == conversation("one", "two", "three")
        assert in_file(tmp_path / "sessions.db") == conversation("one")
    await until(lambda: client.value("store_outage") == 0)
    assert in_file(tmp_path / "sessions.db") == conversation("one", "two", "three")
    assert in_file(tmp_path / "sessions.db", "another") == conversation("hi")
    assert (client.value("store_backlog"), client.value("session_turns_total", outcome="dropped")) == (0, 0)
    await client.inference.Chat(chat("four"))
    assert in_file(tmp_path / "sessions.db") == conversation("one", "two", "three", "four")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        why = f"NOT TESTED, a full disk: mounting a tmpfs needs root: {mounted.stderr.decode().strip()}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(path: Path) -> None:
    """Until nothing more fits on its file system."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk_fails_no_conversation_and_gets_every_turn_when_it_has_room_again(
    small_disk: Path, start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a")
    client = await start_router(node, session_store="sqlite", state_dir=small_disk)
    await client.inference.Chat(chat("one"))
    fill(small_disk / "ballast")
    words = ["w" * 5000 + str(turn) for turn in range(4)]
    for text in words:
        await client.inference.Chat(chat(text))
    assert client.value("store_outage") == 1
    assert sent(node) == [*conversation("one", *words[:-1]), words[-1]]
    (small_disk / "ballast").unlink()
    await until(lambda: client.value("store_outage") == 0)
    assert in_file(small_disk / "sessions.db") == conversation("one", *words)


async def test_a_redis_that_is_killed_and_comes_back_has_every_turn(
    start_node: Any, start_router: Any, start_redis: Any, until: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    client = await start_router(node, session_store="redis", redis_url=redis.url)
    await client.inference.Chat(chat("one"))
    await client.inference.Chat(chat("hi", session_id="another"))
    await redis.kill()
    await client.inference.Chat(chat("two"))
    await client.inference.Chat(chat("three"))
    assert sent(node) == [*conversation("one", "two"), "three"]
    await client.sessions.DeleteSession(inference.DeleteSessionRequest(session_id="another"))
    made = (await client.sessions.CreateSession(inference.CreateSessionRequest())).session.session_id
    await client.inference.Chat(chat("new", session_id=made))
    await redis.start()
    await until(lambda: client.value("store_outage") == 0)
    other = await start_router(node, session_store="redis", redis_url=redis.url, router_id="other")
    assert await contents(other) == conversation("one", "two", "three")
    assert await contents(other, made) == conversation("new")
    error = await refused(contents(other, "another"))
    assert error.code is Code.NOT_FOUND
    await other.inference.Chat(chat("four"))
    assert sent(node) == [*conversation("one", "two", "three"), "four"]


async def test_a_session_that_nobody_here_knows_is_refused_while_the_store_is_away(
    start_node: Any, start_router: Any, start_redis: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    client = await start_router(node, session_store="redis", redis_url=redis.url)
    await redis.kill()
    for call in (
        client.inference.Chat(chat("one")),
        contents(client),
        client.sessions.ListSessions(inference.ListSessionsRequest()),
    ):
        error = await refused(call)
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE", 1.0)
    error = await refused(client.inference.Chat(chat("one")))
    assert error.metadata["session_id"] == "s"
    await client.inference.Chat(chat("without a session", session_id=""))
    assert len(node.submits) == 1


async def test_what_another_router_has_stored_since_is_not_answered_without(
    start_node: Any, start_router: Any, start_redis: Any, until: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    one, other = [
        await start_router(node, session_store="redis", redis_url=redis.url, router_id=name) for name in ("one", "other")
    ]
    await one.inference.Chat(chat("one"))
    await one.inference.Chat(chat("hi", session_id="mine"))
    await other.inference.Chat(chat("two"))
    await until(lambda: "s" not in one.router.sessions.recent)
    await redis.kill()
    assert (await refused(one.inference.Chat(chat("three")))).reason == "SESSION_STORE_UNAVAILABLE"
    await one.inference.Chat(chat("again", session_id="mine"))
    await other.inference.Chat(chat("three"))
    assert sent(node) == [*conversation("one", "two"), "three"]


async def test_a_redis_that_answers_nothing_delays_an_answer_by_the_bound_and_once(
    start_node: Any, start_router: Any, start_redis: Any, until: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    client = await start_router(node, session_store="redis", redis_url=redis.url, tuning={"store": {"wait_s": 0.3}})
    await client.inference.Chat(chat("one"))
    redis.process.send_signal(signal.SIGSTOP)
    took = []
    for text in ("two", "three", "four"):
        began = time.monotonic()
        await client.inference.Chat(chat(text))
        took.append(time.monotonic() - began)
    redis.process.send_signal(signal.SIGCONT)
    assert 0.3 <= took[0] < 1.5
    assert max(took[1:]) < 0.3
    await until(lambda: client.value("store_outage") == 0)
    assert await contents(client) == conversation("one", "two", "three", "four")


async def test_a_session_that_is_not_in_memory_is_waited_for_while_the_store_is_only_slow(
    start_node: Any, start_router: Any, start_redis: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    first = await start_router(node, session_store="redis", redis_url=redis.url, router_id="first")
    await first.inference.Chat(chat("one"))
    other = await start_router(node, session_store="redis", redis_url=redis.url, router_id="other")
    redis.process.send_signal(signal.SIGSTOP)
    asyncio.get_running_loop().call_later(0.6, redis.process.send_signal, signal.SIGCONT)
    await other.inference.Chat(chat("two"))
    assert sent(node) == [*conversation("one"), "two"]
    assert other.value("store_outages_total") == 1


async def test_a_router_begins_without_its_redis_and_finds_it_later(
    start_node: Any, start_router: Any, start_redis: Any, until: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    await redis.kill()
    client = await start_router(node, session_store="redis", redis_url=redis.url)
    await client.inference.Chat(chat("without a session", session_id=""))
    assert (await refused(client.inference.Chat(chat("one")))).reason == "SESSION_STORE_UNAVAILABLE"
    await redis.start()
    await until(lambda: client.value("store_outage") == 0)
    await client.inference.Chat(chat("one"))
    assert await contents(client) == conversation("one")


async def test_when_no_more_can_wait_for_the_store_no_further_turn_begins(
    start_node: Any, start_router: Any, start_redis: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    client = await start_router(node, session_store="redis", redis_url=redis.url, tuning={"store": {"backlog_writes": 2}})
    await client.inference.Chat(chat("one"))
    await redis.kill()
    for text in ("two", "three"):
        await client.inference.Chat(chat(text))
    error = await refused(client.inference.Chat(chat("four")))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE")
    assert "2 writes" in error.message


async def test_a_request_that_comes_while_the_store_dies_under_load_never_fails(
    start_node: Any, start_router: Any, start_redis: Any, until: Any
) -> None:
    node, redis = await start_node("a"), await start_redis()
    client = await start_router(node, session_store="redis", redis_url=redis.url)
    names = [f"s{i}" for i in range(20)]
    await asyncio.gather(*(client.inference.Chat(chat("0", name)) for name in names))

    async def talk(name: str) -> None:
        for turn in range(1, 12):
            await client.inference.Chat(chat(str(turn), name))
            await asyncio.sleep(0.05)

    talks = [asyncio.create_task(talk(name)) for name in names]
    for _ in range(2):
        await asyncio.sleep(0.15)
        await redis.kill()
        await asyncio.sleep(0.15)
        await redis.start()
    await asyncio.gather(*talks)
    await until(lambda: client.value("store_outage") == 0)
    for name in names:
        assert await contents(client, name) == conversation(*map(str, range(12)))
    assert client.value("store_outages_total") >= 1


async def test_a_router_that_stops_while_the_store_is_away_says_how_much_is_lost(start_redis: Any) -> None:
    redis, telemetry = await start_redis(), RouterTelemetry()
    store = await RedisSessions.open(redis_client(redis.url), "test:", SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await redis.kill()
    await sessions.create("s", "m", fresh=True)
    await sessions.append("s", (Message(Role.USER, "one"),), model="m", node_id="a", generation_id="g")
    with capture_logs() as logs:
        await sessions.close()
    assert [(entry["log_level"], entry["writes"]) for entry in logs if "lost" in entry["event"]] == [("error", 2)]
    assert telemetry.registry.get_sample_value("ryzanstein_router_store_lost_writes_total", {"cause": "stopped"}) == 2


async def test_an_outage_is_reported_once_at_its_begin_and_once_at_its_end(start_redis: Any, until: Any) -> None:
    redis, telemetry = await start_redis(), RouterTelemetry()
    store = await RedisSessions.open(redis_client(redis.url), "test:", SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await redis.kill()
    with capture_logs() as logs:
        made = await asyncio.gather(*(sessions.create(f"s{i}", "m", fresh=True) for i in range(20)))
        await asyncio.sleep(0.5)
        await redis.start()
        await until(lambda: telemetry.registry.get_sample_value("ryzanstein_router_store_outage") == 0)
    logged = [entry["event"] for entry in logs if entry["log_level"] in ("info", "warning")]
    assert logged == ["session store fails, sessions are kept in memory", "session store works again"]
    assert {session.session_id for session in (await store.list()).sessions} == {session.session_id for session in made}
    await sessions.close()


async def test_turns_of_a_session_that_the_store_has_lost_are_counted_and_those_behind_them_are_written(
    start_redis: Any, until: Any
) -> None:
    redis, telemetry = await start_redis(), RouterTelemetry()
    store = await RedisSessions.open(redis_client(redis.url), "test:", SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await sessions.create("gone", "m")
    await redis.kill()
    for file in (redis.folder / "appendonlydir").iterdir():
        file.unlink()
    await sessions.append("gone", (Message(Role.USER, "one"),), model="m", node_id="a", generation_id="g")
    await sessions.create("kept", "m", fresh=True)
    await redis.start()
    await until(lambda: telemetry.registry.get_sample_value("ryzanstein_router_store_outage") == 0)
    assert telemetry.registry.get_sample_value("ryzanstein_router_store_lost_writes_total", {"cause": "session_gone"}) == 1
    assert [session.session_id for session in (await store.list()).sessions] == ["kept"]
    await sessions.close()


async def test_a_deletion_during_which_the_store_recovers_does_not_wait_for_the_next_outage(until: Any) -> None:
    class Recovering(MemorySessions):
        """Refuses one deletion, and reads when the outage is over: no real store can be made to do so at that moment."""

        refuses = False

        async def delete(self, session_id: str) -> None:
            if self.refuses:
                self.refuses = False
                raise store_unavailable("once", session_id)
            await super().delete(session_id)

        async def get(self, session_id: str) -> Session:
            await until(lambda: telemetry.store_outage._value.get() == 0)
            return await super().get(session_id)

    bounds, telemetry = SessionBounds(), RouterTelemetry()
    store = Recovering(bounds, lambda number: None)
    sessions = ResilientSessions(store, bounds, OutagePolicy(wait_s=5.0), telemetry)
    await sessions.create("s", "m")
    store.refuses = True
    await sessions.delete("s")
    with pytest.raises(RyzansteinError) as failure:
        await store.get("s")
    assert failure.value.code is Code.NOT_FOUND
    assert telemetry.store_backlog._value.get() == 0
    await sessions.close()


class Full(MemorySessions):
    """Refuses every write at once, or after `waits_s`, while it is `full`."""

    def __init__(self) -> None:
        super().__init__(SessionBounds(), lambda number: None)
        self.full = False
        self.refused = 0
        self.waits_s = 0.0

    async def append(self, session_id: str, messages: Any, **more: Any) -> bool:
        await self._write()
        return await super().append(session_id, messages, **more)

    async def claim(self, request: ClaimRequest) -> None:
        await self._write()
        await super().claim(request)

    async def _write(self) -> None:
        if self.full:
            self.refused += 1
            await asyncio.sleep(self.waits_s)
            raise store_unavailable("full")


@pytest.fixture
async def full(until: Any) -> AsyncIterator[tuple[Full, ResilientSessions, RouterTelemetry]]:
    """A full store with a session and a turn that waits; the next attempt to write it comes some tenths of a second later."""
    store, telemetry = Full(), RouterTelemetry()
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(wait_s=5.0), telemetry)
    await sessions.create("s", "m")
    store.full = True
    await sessions.append("s", wording("one"), model="m", node_id="a", generation_id="1")
    await until(lambda: store.refused == 4)
    yield store, sessions, telemetry
    await sessions.close()


async def test_a_turn_that_ends_when_the_store_is_back_is_at_once_visible_to_other_routers(full: Any) -> None:
    store, sessions, telemetry = full
    store.full = False
    assert telemetry.store_outage._value.get() == 1
    await sessions.append("s", wording("two"), model="m", node_id="a", generation_id="2")
    assert await words(store, "s") == ["one", "two"]


async def test_a_turn_that_begins_when_the_store_is_back_has_a_claim_that_other_routers_see(full: Any) -> None:
    store, sessions, telemetry = full
    store.full = False
    assert telemetry.store_outage._value.get() == 1
    await sessions.claim(ClaimRequest("s", "2", "one", 6.0))
    with pytest.raises(SessionBusyError):
        await store.claim(ClaimRequest("s", "3", "other", 6.0))
    assert telemetry.store_outage._value.get() == 0


async def test_a_turn_that_ends_during_an_attempt_waits_for_the_next_one(full: Any, until: Any) -> None:
    store, sessions, _ = full
    store.waits_s, refused = 0.2, store.refused
    first = asyncio.create_task(sessions.append("s", wording("two"), model="m", node_id="a", generation_id="2"))
    await until(lambda: store.refused == refused + 1)
    # The attempt for the first one has begun, and fails.
    second = asyncio.create_task(sessions.append("s", wording("three"), model="m", node_id="a", generation_id="3"))
    await asyncio.sleep(0)
    store.full = False
    await asyncio.gather(first, second)
    assert await words(store, "s") == ["one", "two", "three"]


async def test_no_turn_waits_for_a_store_that_keeps_its_callers_waiting(full: Any, until: Any) -> None:
    store, sessions, _ = full
    store.waits_s, refused = 0.3, store.refused
    await until(lambda: store.refused == refused + 2)
    began = time.monotonic()
    for number in range(20):
        await sessions.claim(ClaimRequest("s", str(number), "one", 6.0))
        await sessions.append("s", wording("more"), model="m", node_id="a", generation_id=f"more {number}")
    assert time.monotonic() - began < 1.0
    assert store.refused <= refused + 4
    store.full = False


class Odd(MemorySessions):
    """Raises what nobody expects: for every operation while it is `mad`, and for each turn that says what it cannot write."""

    mad = False

    async def append(self, session_id: str, messages: Any, **more: Any) -> bool:
        if self.mad or any("unwritable" in message.content for message in messages):
            raise ValueError("not of this world")
        return await super().append(session_id, messages, **more)

    async def claim(self, request: ClaimRequest) -> None:
        if self.mad:
            raise ValueError("not of this world")
        await super().claim(request)


def wording(text: str) -> tuple[Message, ...]:
    return (Message(Role.USER, text),)


async def words(store: Any, session_id: str) -> list[str]:
    return [message.content for message in (await store.get(session_id)).messages]


async def test_a_turn_waits_also_when_the_store_raises_what_nobody_expects(until: Any) -> None:
    telemetry = RouterTelemetry()
    store = Odd(SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await sessions.create("s", "m")
    store.mad = True
    with capture_logs() as logs:
        await sessions.append("s", wording("one"), model="m", node_id="a", generation_id="g")
        await asyncio.sleep(1.5)
    assert telemetry.registry.get_sample_value("ryzanstein_router_store_outages_total") == 1
    assert next(entry["log_level"] for entry in logs if "ValueError: not of this world" in entry.get("error", "")) == "warning"
    assert (await words(store, "s"), await words(sessions, "s")) == ([], ["one"])
    store.mad = False
    await until(lambda: telemetry.registry.get_sample_value("ryzanstein_router_store_outage") == 0)
    assert await words(store, "s") == ["one"]
    await sessions.close()


async def test_a_turn_that_can_never_be_written_is_given_up_and_those_behind_it_are_not(until: Any) -> None:
    telemetry = RouterTelemetry()
    store = Odd(SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await sessions.create("s", "m")
    for text in ("unwritable", "two"):
        await sessions.append("s", wording(text), model="m", node_id="a", generation_id=text)
    with capture_logs() as logs:
        await until(lambda: telemetry.registry.get_sample_value("ryzanstein_router_store_outage") == 0)
    assert await words(store, "s") == ["two"]
    assert telemetry.registry.get_sample_value("ryzanstein_router_store_lost_writes_total", {"cause": "unwritable"}) == 1
    lost = [entry for entry in logs if entry["event"] == "session write lost"]
    assert [(entry["session_id"], "ValueError" in entry["error"]) for entry in lost] == [("s", True)]
    await sessions.close()


async def test_a_router_that_stops_gives_up_only_what_cannot_be_written() -> None:
    telemetry = RouterTelemetry()
    store = Odd(SessionBounds(), lambda count: None)
    sessions = ResilientSessions(store, SessionBounds(), OutagePolicy(), telemetry)
    await sessions.create("s", "m")
    for text in ("unwritable", "two"):
        await sessions.append("s", wording(text), model="m", node_id="a", generation_id=text)
    with capture_logs() as logs:
        await sessions.close()
    assert [entry["event"] for entry in logs] == ["session write lost"]
    assert telemetry.registry.get_sample_value("ryzanstein_router_store_lost_writes_total", {"cause": "unwritable"}) == 1


async def test_the_answer_of_a_turn_that_the_store_chokes_on_is_the_next_one_s_history(
    start_node: Any, start_router: Any, until: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = await start_node("a")
    client = await start_router(node, session_store="sqlite")
    await client.inference.Chat(chat("one"))
    with monkeypatch.context() as broken:
        broken.setattr(client.router.sessions._store, "_append", lambda *_: {}["not of this world"])
        await client.inference.Chat(chat("two"))
        assert await contents(client) == conversation("one", "two")
    await until(lambda: client.value("store_outage") == 0)
    assert in_file(tmp_path / "sessions.db") == conversation("one", "two")
    assert client.value("session_turns_total", outcome="dropped") == 0


class Unreadable(SqliteSessions):
    """Of a disk that fails for one process: no file system at hand does so."""

    fails = False

    async def _run(self, work: Any) -> Any:
        if self.fails:
            raise store_unavailable("disk I/O error")
        return await super()._run(work)


async def test_what_another_router_wrote_into_the_file_is_not_answered_without(tmp_path: Path) -> None:
    bounds = SessionBounds()
    stores = [await Unreadable.open(tmp_path / "sessions.db", bounds, lambda number: None) for _ in range(2)]
    one, other = [ResilientSessions(store, bounds, OutagePolicy(), RouterTelemetry(), store.changes) for store in stores]
    for session_id in ("both", "mine"):
        await one.create(session_id, "m")
        await one.append(session_id, wording("one"), model="m", node_id="a", generation_id=f"1 {session_id}")
    assert await words(other, "both") == ["one"]
    await other.append("both", wording("two"), model="m", node_id="a", generation_id="2")
    stores[0].fails = True
    assert await words(one, "mine") == ["one"]
    with pytest.raises(RyzansteinError) as failure:
        await one.get("both")
    assert failure.value.reason == "SESSION_STORE_UNAVAILABLE"
    stores[0].fails = False
    async with asyncio.timeout(10):
        while one._outage.active:  # noqa: ASYNC110 - it ends by itself
            await asyncio.sleep(0.02)
    assert await words(one, "both") == ["one", "two"]
    stores[0].fails = True
    assert await words(one, "both") == ["one", "two"]
    stores[0].fails = False
    await one.close()
    await other.close()


async def test_an_answer_of_a_session_that_changed_elsewhere_is_not_added_to_what_was_known(tmp_path: Path) -> None:
    bounds = SessionBounds()
    stores = [await Unreadable.open(tmp_path / "sessions.db", bounds, lambda number: None) for _ in range(2)]
    one, other = [ResilientSessions(store, bounds, OutagePolicy(), RouterTelemetry(), store.changes) for store in stores]
    await one.create("s", "m")
    await other.append("s", wording("theirs"), model="m", node_id="a", generation_id="1")
    await one.append("s", wording("ours"), model="m", node_id="a", generation_id="2")
    stores[0].fails = True
    with pytest.raises(RyzansteinError):
        await one.get("s")
    stores[0].fails = False
    assert await words(other, "s") == ["theirs", "ours"]
    await one.close()
    await other.close()


@pytest.mark.parametrize("change", ["create", "delete"])
async def test_a_change_that_the_store_refuses_makes_no_old_copy_current(tmp_path: Path, change: str) -> None:
    bounds = SessionBounds()
    stores = [await Unreadable.open(tmp_path / "sessions.db", bounds, lambda number: None) for _ in range(2)]
    one, other = [ResilientSessions(store, bounds, OutagePolicy(), RouterTelemetry(), store.changes) for store in stores]
    await one.create("s", "m")
    if change == "create":
        await other.append("s", wording("theirs"), model="m", node_id="a", generation_id="1")
    else:
        await other.delete("s")
    with pytest.raises(RyzansteinError):
        await (one.create("s", "m") if change == "create" else one.delete("s"))
    stores[0].fails = True
    with pytest.raises(RyzansteinError) as failure:
        await one.get("s")
    assert failure.value.reason == "SESSION_STORE_UNAVAILABLE"
    stores[0].fails = False
    await one.close()
    await other.close()
