"""Routers that are killed, stopped and restarted in the middle of answers: the client goes on at another one."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.errors import Code
from ryzanstein.generation.request import EXTENDED
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

TOKENS = 60
FIRST_OF_EPOCH_1 = 1 << 16


def whole(choice: int = 0, tokens: int = TOKENS) -> list[int]:
    return [1000 * (choice + 1) + index for index in range(tokens)]


def text(choice: int = 0, tokens: int = TOKENS) -> str:
    return "".join(f"{choice}.{index} " for index in range(tokens))


@pytest.fixture
async def node(start_node: Any) -> Any:
    return await start_node("a", step_s=0.01)


async def failure_of(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return error_from_rpc(failure.value)


async def test_a_killed_routers_generations_go_on_at_another_one_at_any_index(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node)
    for index in (0, 1, 7, 31, TOKENS - 1):
        client = new_client()
        await client.ask(first, TOKENS, until_tokens=index)
        await first.kill()
        await client.come_back(second)
        assert client.seen.tokens == {0: whole()}
        assert client.seen.texts == {0: text()}
        assert client.seen.usage == inference.Usage(prompt_tokens=7, completion_tokens=TOKENS, cached_prompt_tokens=3)
        assert index == TOKENS - 1 or node.submits[-1].attempt >= FIRST_OF_EPOCH_1
        await first.start()
    assert await second.value("generations_taken_over_total") == 5


@pytest.mark.long
async def test_at_random_cuts_over_a_chain_of_routers_nothing_is_lost_or_repeated(
    start_node: Any, start_routers: Any, new_client: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    routers = await start_routers(4, node)
    cuts = sorted(random.Random(2026).sample(range(1, 2 * TOKENS), 3))
    client = new_client()
    await client.ask(routers[0], TOKENS, until_tokens=cuts[0], n=3, logprobs=1)
    for number, cut in enumerate([*cuts[1:], None]):
        await routers[number].kill()
        await client.come_back(routers[number + 1], cut)
    assert client.seen.tokens == {choice: whole(choice) for choice in range(3)}
    assert {choice: len(values) for choice, values in client.seen.logprobs.items()} == {0: TOKENS, 1: TOKENS, 2: TOKENS}
    assert client.seen.usage.completion_tokens == 3 * TOKENS
    assert [submit.attempt for submit in node.submits] == [0, FIRST_OF_EPOCH_1, 2 * FIRST_OF_EPOCH_1, 3 * FIRST_OF_EPOCH_1]


@pytest.mark.long
async def test_a_client_that_is_ahead_of_the_journal_gets_no_token_twice(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, tuning={"journal_flush_s": 1.0})
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=25)
    await first.kill()
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}
    resumed = node.submits[-1].generated
    assert sum(len(choice.token_ids) for choice in resumed) < 25, "the journal was not behind"


@pytest.mark.long
async def test_a_router_that_restarts_goes_on_with_its_own_generations(node: Any, start_routers: Any, new_client: Any) -> None:
    (router,) = await start_routers(1, node)
    client = new_client()
    await client.ask(router, TOKENS, until_tokens=5)
    await router.kill()
    await router.start()
    await client.come_back(router)
    assert client.seen.tokens == {0: whole()}
    # Its port for other routers is a free one here, so that it may not know itself by its address.
    causes = [await router.value("generations_taken_over_total", cause=cause) for cause in ("restarted", "unreachable")]
    assert sum(causes) == 1


@pytest.mark.long
async def test_the_window_does_not_run_while_no_router_lives(node: Any, start_routers: Any, new_client: Any) -> None:
    (router,) = await start_routers(1, node, reattach_window_s=1.5, lease_s=0.5)
    runs, ended = new_client(), new_client()
    await runs.ask(router, TOKENS, until_tokens=20)
    await ended.ask(router, 30, until_tokens=20)
    await asyncio.sleep(0.5)
    await router.kill()
    await asyncio.sleep(3.0)
    await router.start()
    for client, tokens in ((runs, TOKENS), (ended, 30)):
        await client.come_back(router)
        assert client.seen.tokens == {0: whole(tokens=tokens)}


async def test_a_router_that_is_asked_to_stop_hands_its_generations_over(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, drain_grace_s=0.2)
    client = new_client()
    await client.ask(first, 200, until_tokens=5)
    first.send(signal.SIGTERM)
    assert await first.ended() == 0
    await client.come_back(second)
    assert client.seen.tokens == {0: whole(tokens=200)}
    assert client.seen.reasons == {0: inference.FINISH_REASON_LENGTH}


@pytest.mark.long
async def test_a_reader_elsewhere_is_relayed_and_survives_the_owners_death(
    node: Any, start_routers: Any, new_client: Any, until: Any
) -> None:
    first, second = await start_routers(2, node)
    client = new_client()
    stream = await client.ask(first, 200, until_tokens=5, n=2, logprobs=1)
    stream.cancel()
    reading = asyncio.create_task(client.come_back(second))
    await until(lambda: client.seen.num_tokens > 40)
    assert await second.value("generations_relayed_total") == 1
    assert await second.value("generations_taken_over_total") == 0
    await first.kill()
    await reading
    assert client.seen.tokens == {choice: whole(choice, 200) for choice in range(2)}
    assert client.seen.texts == {choice: text(choice, 200) for choice in range(2)}
    assert await second.value("generations_taken_over_total", cause="unreachable") == 1


@pytest.mark.long
async def test_of_two_routers_asked_at_once_one_goes_on_and_both_readers_get_all(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    owner, *others = await start_routers(3, node)
    client = new_client()
    await client.ask(owner, TOKENS, until_tokens=10)
    await owner.kill()
    readers = [new_client() for _ in range(4)]
    for reader in readers:
        reader.seen.generation_id = client.seen.generation_id
    await asyncio.gather(*(reader.come_back(others[i % 2]) for i, reader in enumerate(readers)))
    assert all(reader.seen.tokens == {0: whole()} for reader in readers)
    taken = [await router.value("generations_taken_over_total") for router in others]
    assert sorted(taken) == [0, 1]
    assert len(node.submits) == 2


@pytest.mark.long
async def test_a_stopped_router_that_comes_back_learns_that_its_generation_moved(
    start_node: Any, start_routers: Any, new_client: Any, until: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    first, second = await start_routers(2, node, lease_s=0.5)
    client, stuck = new_client(), new_client()
    stream = await client.ask(first, 300, until_tokens=5, session_id="s")
    stuck.seen.generation_id = client.seen.generation_id
    staying = asyncio.create_task(failure_of(stuck.come_back(first)))
    await until(lambda: stuck.seen.num_tokens > 0)
    first.send(signal.SIGSTOP)
    await client.come_back(second, until_tokens=100)
    first.send(signal.SIGCONT)
    error = await staying
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "GENERATION_MOVED")
    assert error.retry_after_s is not None
    assert stuck.seen.tokens[0] == whole(tokens=len(stuck.seen.tokens[0]))
    stream.cancel()
    await until(lambda: len(node.cancels) == 1)
    # At the old owner too it is found again, at the new one.
    await asyncio.gather(client.come_back(second), stuck.come_back(first))
    assert client.seen.tokens == stuck.seen.tokens == {0: whole(tokens=300)}
    assert await second.value("generations_taken_over_total", cause="lease_expired") == 1
    assert await first.value("generations_moved_total") == 1
    session = (await second.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    assert [message.content for message in session.messages] == ["hello", text(tokens=300)]
    assert len(first.events("generation taken over")) == 0


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.long
async def test_a_sessions_turn_is_stored_once_whoever_finishes(
    node: Any, start_routers: Any, new_client: Any, ended: bool
) -> None:
    first, second = await start_routers(2, node)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=None if ended else 20, session_id="s")
    await first.kill()
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}
    session = (await second.sessions.GetSession(inference.GetSessionRequest(session_id="s"))).session
    assert [message.content for message in session.messages] == ["hello", text()]
    await new_client().ask(second, 3, session_id="s")


@pytest.mark.parametrize("store", ["sqlite", "redis"])
@pytest.mark.long
async def test_a_dead_routers_sessions_answer_the_next_request_at_once(
    node: Any, start_routers: Any, new_client: Any, start_redis: Any, store: str
) -> None:
    flags = {"session_store": "redis", "redis_url": (await start_redis()).url} if store == "redis" else {}
    first, second = await start_routers(2, node, tuning={"claim_ttl_s": 60}, **flags)
    await new_client().ask(first, TOKENS, until_tokens=3, session_id="s")
    refusal = await failure_of(new_client().ask(second, 2, session_id="s"))
    assert (refusal.code, refusal.reason) == (Code.ABORTED, "SESSION_BUSY"), "the first router lives and is answering"
    await first.kill()
    # A client whose stream broke before it had the generation's name cannot attach: it asks again.
    client = new_client()
    await client.ask(second, TOKENS, session_id="s")
    assert client.seen.tokens == {0: whole()}
    assert len(second.events("stale session claim replaced")) == 1


@pytest.mark.long
async def test_a_router_that_starts_again_answers_in_the_sessions_it_died_with(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    (router,) = await start_routers(1, node, tuning={"claim_ttl_s": 60}, lease_s=60)
    await new_client().ask(router, TOKENS, until_tokens=3, session_id="s")
    await router.kill()
    await router.start()
    client = new_client()
    await client.ask(router, TOKENS, session_id="s")
    assert client.seen.tokens == {0: whole()}


@pytest.mark.long
async def test_a_stopped_routers_sessions_are_free_when_its_lease_has_expired(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, tuning={"claim_ttl_s": 60}, lease_s=1)
    await new_client().ask(first, TOKENS, until_tokens=3, session_id="s")
    first.send(signal.SIGSTOP)
    client = new_client()
    await client.ask(second, TOKENS, session_id="s")
    assert client.seen.tokens == {0: whole()}
    first.send(signal.SIGCONT)


@pytest.mark.long
async def test_a_router_that_slept_for_longer_than_the_journal_keeps_goes_on(
    start_node: Any, start_routers: Any, new_client: Any
) -> None:
    node = await start_node("a", step_s=0.02)
    (router,) = await start_routers(1, node, lease_s=0.5, reattach_window_s=0.5)
    (other,) = await start_routers(1, node, lease_s=0.5, reattach_window_s=0.5)
    client = new_client()
    await client.ask(router, 300, until_tokens=5)
    router.send(signal.SIGSTOP)
    await asyncio.sleep(2)
    lost = new_client()
    lost.seen.generation_id = client.seen.generation_id
    assert (await failure_of(lost.come_back(other))).code is Code.NOT_FOUND, "it has expired"
    router.send(signal.SIGCONT)
    await client.come_back(router)
    assert client.seen.tokens == {0: whole(tokens=300)}
    assert await router.value("generations_moved_total") == 0


@pytest.mark.long
async def test_a_generation_is_cancelled_from_any_router(node: Any, start_routers: Any, new_client: Any, until: Any) -> None:
    first, second = await start_routers(2, node)
    for dead in (False, True):
        client = new_client()
        stream = await client.ask(first, 2000, until_tokens=5)
        request = inference.CancelGenerationRequest(generation_id=client.seen.generation_id)
        if dead:
            await first.kill()
        await second.inference.CancelGeneration(request)
        if dead:
            await client.come_back(second)
        else:
            await client.seen.read(stream)
        assert client.seen.reasons == {0: inference.FINISH_REASON_CANCELLED}
        await until(lambda: node.num_running == 0)
        assert (await failure_of(second.inference.CancelGeneration(request))).code is Code.NOT_FOUND


@pytest.mark.long
async def test_what_nobody_comes_back_for_expires_everywhere(
    node: Any, start_routers: Any, new_client: Any, until: Any
) -> None:
    first, second = await start_routers(2, node, reattach_window_s=0.5, lease_s=0.5)
    client = new_client()
    await client.ask(first, 2000, until_tokens=5)
    await first.kill()
    await until(lambda: node.num_running == 0)
    await asyncio.sleep(1.2)
    error = await failure_of(client.come_back(second))
    assert (error.code, error.reason) == (Code.NOT_FOUND, "GENERATION_NOT_FOUND")
    assert len(node.submits) == 1


@pytest.mark.long
async def test_a_generation_that_failed_for_good_fails_the_same_way_elsewhere(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, tuning={"max_fruitless_attempts": 1})
    client = new_client()
    node.freeze_at = 0
    await client.ask(first, TOKENS, until_tokens=0)
    await node.die()
    error = await failure_of(client.come_back(first))
    await asyncio.sleep(0.2)  # its end is on record by then
    await first.kill()
    again = await failure_of(client.come_back(second))
    assert (error.code, error.reason, error.retry_after_s) == (Code.INTERNAL, "ATTEMPTS_EXHAUSTED", None)
    assert (again.code, again.reason, again.message) == (error.code, error.reason, error.message)
    assert again.retry_after_s is None


@pytest.mark.long
async def test_what_ended_for_want_of_nodes_goes_on_at_another_router(node: Any, start_routers: Any, new_client: Any) -> None:
    first, second = await start_routers(2, node, failover_wait_s=0.2)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=5)
    await node.die()
    assert (await failure_of(client.come_back(first))).reason == "NO_NODES"
    assert (await failure_of(client.come_back(second))).reason == "NO_NODES", "its owner has tried again"
    await asyncio.sleep(0.2)  # its end is on record by then
    await first.kill()
    await node.start()
    await linked(second)
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}


@pytest.mark.long
async def test_what_was_resumed_goes_on_at_another_router_when_its_own_dies_then(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, failover_wait_s=0.2)
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=5)
    await node.die()
    assert (await failure_of(client.come_back(first))).reason == "NO_NODES"
    await asyncio.sleep(0.2)  # its end is on record by then
    await node.start()
    await linked(first)
    await client.come_back(first, until_tokens=client.seen.num_tokens + 10)
    await asyncio.sleep(0.2)
    await first.kill()
    await linked(second)
    await client.come_back(second)
    assert client.seen.tokens == {0: whole()}
    assert (await second.value("generations_total", outcome="unavailable")) == 0


async def linked(router: Any) -> None:
    async with asyncio.timeout(20):
        while not await router.value("link_up"):  # noqa: ASYNC110 - a process tells its metrics when asked
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_an_event_stream_that_ended_for_want_of_nodes_is_resumed_with_its_last_event_id(
    node: Any, start_routers: Any
) -> None:
    (router,) = await start_routers(1, node, failover_wait_s=0.2)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": TOKENS}
    seen, last_id, response_id = "", "", ""

    def take(line: str) -> None:
        nonlocal seen, last_id, response_id
        if line.startswith("id: "):
            last_id = line[4:]
        elif line.startswith('data: {"id"'):
            chunk = httpx.Response(200, text=line[6:]).json()
            response_id = chunk["id"]
            seen += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])

    node.die_at = 9
    async with httpx.AsyncClient(timeout=30) as http:
        async with http.stream("POST", f"{router.http_url}/v1/chat/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines()]
        assert "event: error" in lines
        for line in lines:
            take(line)
        await node.start()
        await linked(router)
        url = f"{router.http_url}/v1/generations/{response_id}/events"
        async with http.stream("GET", url, headers={"Last-Event-ID": last_id}) as response:
            async for line in response.aiter_lines():
                take(line)
    assert seen == text(0)


@pytest.mark.long
async def test_server_sent_events_go_on_at_another_router(node: Any, start_routers: Any) -> None:
    first, second = await start_routers(2, node)
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": TOKENS, "n": 2}
    seen = {0: "", 1: ""}
    last_id = response_id = ""

    def take(line: str) -> None:
        nonlocal last_id, response_id
        if line.startswith("id: "):
            last_id = line[4:]
        elif line.startswith("data: {"):
            chunk = httpx.Response(200, text=line[6:]).json()
            response_id = chunk["id"]
            for choice in chunk["choices"]:
                seen[choice["index"]] += choice["delta"].get("content") or ""

    async with httpx.AsyncClient(timeout=30) as http:
        async with http.stream("POST", f"{first.http_url}/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                take(line)
                if len(seen[1]) > 60 and not line:
                    break
        await first.kill()
        url = f"{second.http_url}/v1/generations/{response_id}/events"
        async with http.stream("GET", url, headers={"Last-Event-ID": last_id}) as response:
            lines = [line async for line in response.aiter_lines()]
    for line in lines:
        take(line)
    assert seen == {0: text(0), 1: text(1)}
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


@pytest.mark.long
async def test_without_a_journal_a_router_knows_its_own_generations_only(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, session_store="memory")
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=5)
    assert (await failure_of(client.come_back(second))).code is Code.NOT_FOUND


# The router of an earlier version knows no feature; what it cannot read is the same.
OF_AN_EARLIER_VERSION = """
import sys
from ryzanstein.router.journal import encoding
encoding.KNOWN_FEATURES = frozenset()
from ryzanstein.router.__main__ import main
sys.exit(main())
"""


@pytest.mark.long
async def test_what_an_older_router_took_and_cannot_read_goes_on_at_a_newer_one(
    start_node: Any, start_routers: Any, new_client: Any
) -> None:
    """Each time that the older one is asked it takes the generation again, so the head is another one each time."""
    node = await start_node("a", step_s=0.01, features=(EXTENDED,))
    first, older, newer = await start_routers(3, node)
    await older.kill()
    older.command = ("-c", OF_AN_EARLIER_VERSION)
    await older.start()
    client = new_client()
    await client.ask(first, TOKENS, until_tokens=5, bad_words=["no"])
    await first.kill()
    error = await failure_of(client.come_back(older))
    assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "ROUTER_TOO_OLD")
    await client.come_back(newer)
    assert client.seen.tokens == {0: whole()}
    assert await newer.value("generations_taken_over_total", cause="too_old") == 1
