"""Idempotency keys: in both journals, and over routers that share one."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import RequestKey
from ryzanstein.router.generations.idempotency import IdempotencyKeys, KeyTakenError
from ryzanstein.router.journal import journal as journals
from ryzanstein.router.journal.journal import Append, KeyClaim, Owner
from ryzanstein.router.journal.keys import JournalKeys
from ryzanstein.router.journal.metrics import JournalMetrics, JournalOutage
from ryzanstein.router.journal.stores.redis import RedisJournal
from ryzanstein.router.journal.stores.sqlite import SqliteJournal
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.storage.redis_client import redis_client
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

TOKENS = 60
ONE = Owner("one/1", "127.0.0.1:1")


@pytest.fixture(params=["sqlite", "redis"])
async def open_journal(request: pytest.FixtureRequest, tmp_path: Path, start_redis: Any) -> Any:
    url = (await start_redis()).url if request.param == "redis" else ""
    opened: list[Any] = []

    async def open_one() -> Any:
        if request.param == "redis":
            opened.append(RedisJournal(redis_client(url, decode_responses=False), "test:", 60.0, 60.0))
        else:
            opened.append(await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0))
        return opened[-1]

    yield open_one
    for journal in opened:
        await journal.close()


async def test_the_first_claim_has_the_key_until_its_generation_is_gone_or_it_is_freed(open_journal: Any) -> None:
    one, other = await open_journal(), await open_journal()
    assert await one.claim_key("k", KeyClaim("a", b"body"), 60) is None
    assert await one.claim_key("k", KeyClaim("a", b"body"), 60) is None
    assert await other.claim_key("k", KeyClaim("b", b"\0\xff"), 60) == KeyClaim("a", b"body", begun=False)
    await one.write(ONE, [Append("a", 0, b"", b"request")])
    assert await other.claim_key("k", KeyClaim("b", b"body"), 60) == KeyClaim("a", b"body", begun=True)
    await other.free_key("k", "b")
    assert await other.claim_key("k", KeyClaim("b", b"body"), 60) is not None
    await one.free_key("k", "a")
    assert await other.claim_key("k", KeyClaim("b", b"\0\xff"), 60) is None
    assert await one.claim_key("k", KeyClaim("c", b""), 60) == KeyClaim("b", b"\0\xff", begun=False)


async def test_a_claim_whose_router_died_before_it_began_anything_ends_by_itself(open_journal: Any, monkeypatch: Any) -> None:
    for module in ("redis", "sqlite"):
        monkeypatch.setattr(f"ryzanstein.router.journal.stores.{module}.KEY_HOLD_S", 0.05)
    one, other = await open_journal(), await open_journal()
    assert await one.claim_key("k", KeyClaim("a", b"body"), 60) is None
    assert await one.claim_key("begun", KeyClaim("c", b"body"), 60) is None
    await one.write(ONE, [Append("c", 0, b"", b"request")])
    await asyncio.sleep(0.1)
    assert await other.claim_key("begun", KeyClaim("d", b"body"), 60) == KeyClaim("c", b"body", begun=True)
    assert await other.claim_key("k", KeyClaim("b", b"body"), 60) is None
    await one.remove([("c", 0)])
    assert await other.claim_key("begun", KeyClaim("d", b"body"), 60) is None


async def test_of_many_claims_at_once_one_has_the_key(open_journal: Any) -> None:
    opened = [await open_journal() for _ in range(4)]
    claims = [journal.claim_key("k", KeyClaim(f"{i}-{j}", b""), 60) for j in range(5) for i, journal in enumerate(opened)]
    held = await asyncio.gather(*claims)
    assert held.count(None) == 1
    assert len({claim.generation_id for claim in held if claim is not None}) == 1


async def test_claims_are_cleared_away(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ryzanstein.router.journal.stores.sqlite.KEY_HOLD_S", 0.01)
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    for number in range(50):
        await journal.claim_key(f"k{number}", KeyClaim("a", b""), 0.01)
    await asyncio.sleep(0.05)
    await journal.renew(ONE)
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as file:
        assert file.execute("SELECT count(*) FROM keys").fetchone() == (0,)


async def test_a_file_of_the_version_before_keeps_what_it_has(tmp_path: Path) -> None:
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    await journal.write(ONE, [Append("a", 0, b"", b"request")])
    await journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as file:
        file.execute("DROP TABLE keys")
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    assert await journal.head("a") is not None
    assert await journal.claim_key("k", KeyClaim("a", b""), 60) is None
    await journal.close()


def chat(text: str = "hello", key: str = "k", session_id: str = "s") -> inference.ChatRequest:
    return inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content=text)],
        sampling=inference.SamplingParams(max_tokens=TOKENS),
        session_id=session_id,
        request_id=key,
    )


async def begun(router: Any, request: inference.ChatRequest) -> Any:
    """An open stream that has brought a token, and its generation's id."""
    stream = router.inference.StreamChat(inference.StreamChatRequest(chat=request), timeout=60)
    generation_id = (await stream.read()).event.started.generation_id
    await stream.read()
    return stream, generation_id


async def refusal(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def when_the_journal_is_back(router: Any, request: inference.ChatRequest) -> Any:
    async with asyncio.timeout(20):
        while True:
            try:
                return await router.inference.Chat(request, timeout=60)
            except grpc.aio.AioRpcError as failure:
                if error_from_rpc(failure).reason != "JOURNAL_UNAVAILABLE":
                    raise
                await asyncio.sleep(0.2)


async def num_messages(router: Any, session_id: str = "s") -> int:
    session = (await router.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return len(session.messages)


async def test_a_repetition_at_another_router_joins_the_generation_and_survives_its_owner(
    start_node: Any, start_routers: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    first, second = await start_routers(2, node)
    stream, generation_id = await begun(first, chat())
    stream.cancel()
    error = await refusal(second.inference.Chat(chat("other"), timeout=60))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "IDEMPOTENCY_MISMATCH")
    joined = asyncio.ensure_future(second.inference.Chat(chat(), timeout=60))
    await asyncio.sleep(0.2)
    await first.kill()
    later = await second.inference.Chat(chat(), timeout=60)
    for answer in (await joined, later):
        assert answer.generation_id == generation_id
        assert list(answer.choices[0].token_ids) == [1000 + index for index in range(TOKENS)]
    assert await num_messages(second) == 2
    await first.start()
    assert (await first.inference.Chat(chat(), timeout=60)).generation_id == generation_id
    assert (await refusal(first.inference.Chat(chat("other"), timeout=60))).reason == "IDEMPOTENCY_MISMATCH"


async def test_of_two_routers_that_are_asked_at_once_one_runs_it(start_node: Any, start_routers: Any) -> None:
    node = await start_node("a", step_s=0.005)
    routers = await start_routers(2, node)
    requests = [chat(key=f"k{i}", session_id=f"s{i}") for i in range(12)]
    answers = await asyncio.gather(*(r.inference.Chat(request, timeout=60) for request in requests for r in routers))
    assert [first.generation_id for first in answers[::2]] == [second.generation_id for second in answers[1::2]]
    assert len(node.submits) == len(requests)
    assert [await num_messages(routers[0], f"s{i}") for i in range(12)] == 12 * [2]


async def test_a_request_that_waits_longer_than_a_claim_holds_is_run_once(start_node: Any, start_routers: Any) -> None:
    """Its prompt is filled in by a node that stands still: nothing is launched or recorded meanwhile."""
    node = await start_node("a", frozen=True)
    first, second = await start_routers(2, node)
    sampling = inference.SamplingParams(max_tokens=3)
    body = inference.CompleteRequest(text="a", suffix="c", sampling=sampling, request_id="k")
    one = asyncio.ensure_future(first.inference.Complete(body, timeout=60))
    await asyncio.sleep(journals.KEY_HOLD_S + 1)
    two = asyncio.ensure_future(second.inference.Complete(body, timeout=60))
    await asyncio.sleep(1)
    node.frozen = False
    assert (await one).generation_id == (await two).generation_id
    assert len(node.submits) == 1


async def test_a_claim_that_was_lost_is_found_before_the_launch(tmp_path: Path, monkeypatch: Any) -> None:
    """The first router stands still until its claim has ended, and the second one begins the request."""
    monkeypatch.setattr("ryzanstein.router.journal.stores.sqlite.KEY_HOLD_S", 0.05)
    journal = await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0)
    outage = JournalOutage(JournalMetrics(CollectorRegistry()))
    shared = JournalKeys(journal, 60.0, outage)
    shared.hold_s = 1000.0  # no renewal in time
    stood_still, other = (IdempotencyKeys(shared, RouterTelemetry()) for _ in range(2))
    key = RequestKey("k", b"body")
    assert await stood_still.claim(key, "a", 60) == "a"
    await stood_still.confirm("a")
    await asyncio.sleep(0.1)
    shared.hold_s = 0.05
    assert await other.claim(key, "b", 60) == "b"
    await other.confirm("b")
    late = asyncio.ensure_future(stood_still.confirm("a"))
    await journal.write(ONE, [Append("b", 0, b"", b"request")])
    with pytest.raises(KeyTakenError) as taken:
        await late
    assert taken.value.generation_id == "b"
    for keys, generation_id in ((stood_still, "a"), (other, "b")):
        keys.free(generation_id)
        await keys.close()
    await journal.close()


async def test_what_failed_at_one_router_runs_anew_at_another(start_node: Any, start_routers: Any, until: Any) -> None:
    node = await start_node("a")
    first, second = await start_routers(2, node)
    node.refuse = RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"prompt_tokens": "9"})
    assert (await refusal(first.inference.Chat(chat(), timeout=60))).reason == "CONTEXT_TOO_LONG"
    node.refuse = None
    # The second router may still find the failed one for a moment.
    async with asyncio.timeout(10):
        while True:
            try:
                answer = await second.inference.Chat(chat(), timeout=60)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
    assert len(answer.choices[0].token_ids) == TOKENS
    assert await num_messages(second) == 2


async def test_while_the_journal_cannot_take_a_key_its_request_is_refused_and_every_other_one_is_served(
    start_node: Any, start_routers: Any, tmp_path: Path
) -> None:
    node = await start_node("a", step_s=0.005)
    first, second = await start_routers(2, node)
    known = await first.inference.Chat(chat(key="known"), timeout=60)
    with sqlite3.connect(tmp_path / "journal.db", isolation_level=None) as file:
        file.execute("BEGIN EXCLUSIVE")
        asked = (refusal(router.inference.Chat(chat(session_id="t"), timeout=60)) for router in (first, second))
        for error in await asyncio.gather(*asked):
            assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "JOURNAL_UNAVAILABLE", 1.0)
        unkeyed = await first.inference.Chat(chat(key="", session_id="u"), timeout=60)
        assert len(unkeyed.choices[0].token_ids) == TOKENS
        again = await first.inference.Chat(chat(key="known"), timeout=60)
        assert again.generation_id == known.generation_id
        file.execute("ROLLBACK")
    assert await first.value("keyed_requests_total", outcome="unavailable") == 1
    answers = [await when_the_journal_is_back(router, chat(session_id="t")) for router in (first, second)]
    assert answers[0].generation_id == answers[1].generation_id
    assert await num_messages(first, "t") == 2


async def test_a_key_that_is_taken_too_late_is_given_back(tmp_path: Path) -> None:
    """The journal is at work for longer than anybody waits, and takes the key when its request has been refused."""
    one, other = [await SqliteJournal.open(tmp_path / "journal.db", 60.0, 60.0) for _ in range(2)]
    telemetry, outage = RouterTelemetry(), JournalOutage(JournalMetrics(CollectorRegistry()))
    ring = IdempotencyKeys(JournalKeys(one, 60.0, outage), telemetry)
    key = RequestKey("k", b"body")
    lock = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    one._thread.submit(time.sleep, 0.6)
    asyncio.get_running_loop().call_later(1.2, lock.execute, "ROLLBACK")
    with pytest.raises(RyzansteinError) as refused:
        await ring.claim(key, "a", 60.0)
    assert (refused.value.code, refused.value.reason) == (Code.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
    assert lock.in_transaction
    await ring.close()
    assert await other.claim_key("k", KeyClaim("b", b"body"), 60.0) is None
    assert not outage.lasts
    lock.close()
    for journal in (one, other):
        await journal.close()


@pytest.mark.parametrize("quoted", [True, False])
async def test_over_http_a_stream_and_a_plain_request_join_what_runs_at_another_router(
    start_node: Any, start_routers: Any, quoted: bool
) -> None:
    node = await start_node("a", step_s=0.02)
    first, second = await start_routers(2, node)
    headers = {"Idempotency-Key": '"a-1"' if quoted else "a-1", "X-Session-Id": "s"}
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS}
    text = "".join(f"0.{index} " for index in range(TOKENS))
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{first.http_url}/v1/chat/completions"
        async with http.stream("POST", url, json={**body, "stream": True}, headers=headers) as response:
            async for line in response.aiter_lines():
                if "0.3" in line:
                    break
        url = f"{second.http_url}/v1/chat/completions"
        plain = await http.post(url, json=body, headers=headers)
        assert plain.json()["choices"][0]["message"]["content"] == text
        lines = (await http.post(url, json={**body, "stream": True}, headers=headers)).text
        assert plain.json()["id"] in lines
        assert "data: [DONE]" in lines
        other = await http.post(url, json={**body, "max_tokens": 3}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
        torn = await http.post(url, json=body, headers={"Idempotency-Key": '"a'})
        assert (torn.status_code, torn.json()["error"]["param"]) == (400, "Idempotency-Key")
        completion = {"prompt": "once", "max_tokens": 2}
        url = f"{second.http_url}/v1/completions"
        two = [(await http.post(url, json=completion, headers={"Idempotency-Key": "c"})).json()["id"] for _ in range(2)]
        assert two[0] == two[1]
    assert await num_messages(second) == 2
    assert len(node.submits) == 2
    assert journals.KEY_HOLD_S > 1
