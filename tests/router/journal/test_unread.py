"""Generations that nobody reads, of routers that share a journal: paused, taken over, ended for a new turn at another one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

LONG = 4000


def whole(tokens: int) -> list[int]:
    return [1000 + index for index in range(tokens)]


def text(tokens: int) -> str:
    return "".join(f"0.{index} " for index in range(tokens))


@pytest.fixture
async def node(start_node: Any) -> Any:
    return await start_node("a", step_s=0.01)


async def has(router: Any, name: str, at_least: int = 1) -> None:
    async with asyncio.timeout(20):
        while await router.value(name) < at_least:  # noqa: ASYNC110 - another process tells nobody
            await asyncio.sleep(0.05)


async def messages(router: Any, session_id: str = "s") -> list[str]:
    session = (await router.sessions.GetSession(inference.GetSessionRequest(session_id=session_id))).session
    return [message.content for message in session.messages]


@pytest.fixture(params=["sqlite", "redis"])
async def shared(request: Any, start_redis: Any) -> dict[str, Any]:
    # A machine that stands still for a second is no outage of the store.
    if request.param == "sqlite":
        return {"tuning": {"store": {"wait_s": 5}}}
    server = await start_redis()
    return {"session_store": "redis", "redis_url": server.url, "tuning": {"store": {"wait_s": 5}}}


async def test_a_paused_one_goes_on_at_another_router_when_its_own_is_gone(
    node: Any, start_routers: Any, new_client: Any
) -> None:
    first, second = await start_routers(2, node, unread_grace_s=0.2)
    client = new_client()
    (await client.ask(first, 200, 5, session_id="s")).cancel()
    await has(first, "generations_paused_total")
    await first.kill()
    await client.come_back(second)
    assert client.seen.tokens == {0: whole(200)}
    assert await messages(second) == ["hello", text(200)]
    assert await second.value("generations_taken_over_total") == 1


@pytest.mark.parametrize("grace_s", [0.1, 60.0])
async def test_a_new_turn_at_another_router_ends_it_at_once(
    node: Any, start_routers: Any, shared: dict[str, str], new_client: Any, grace_s: float
) -> None:
    first, second = await start_routers(2, node, unread_grace_s=grace_s, **shared)
    client, other = new_client(), new_client()
    stream = await client.ask(first, LONG, 5, session_id="s")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await new_client().ask(second, 2, session_id="s")
    assert error_from_rpc(failure.value).reason == "SESSION_BUSY", "somebody reads it"
    stream.cancel()
    if grace_s < 1:
        await has(first, "generations_paused_total")
    else:
        await has(first, "requests_total", at_least=2)
    await other.ask(second, 2, session_id="s")
    question, visible, *rest = await messages(second)
    assert [question, *rest] == ["hello", "hello", text(2)]
    assert text(LONG).startswith(visible)
    assert len(visible) >= len(text(5))
    assert await first.value("generations_interrupted_total") == 1
    await client.come_back(second)
    assert client.seen.reasons == {0: inference.FINISH_REASON_CANCELLED}


async def test_what_was_shown_is_known_to_the_router_that_takes_over(node: Any, start_routers: Any, new_client: Any) -> None:
    first, second = await start_routers(2, node, unread_grace_s=0.2)
    client = new_client()
    (await client.ask(first, LONG, 20, session_id="s")).cancel()
    await has(first, "generations_paused_total")
    await first.kill()
    late = new_client()
    late.seen.generation_id = client.seen.generation_id
    (await late.come_back(second, 1)).cancel()
    await has(second, "generations_paused_total")
    await new_client().ask(second, 2, session_id="s")
    _, visible, *_ = await messages(second)
    assert len(visible) >= len(text(20))


async def test_of_a_reader_and_a_new_turn_at_different_routers_one_wins(
    start_node: Any, start_routers: Any, new_client: Any
) -> None:
    node = await start_node("a", step_s=0.002)
    routers = await start_routers(2, node, unread_grace_s=0.1)
    rng = random.Random(5)
    for number in range(20):
        session_id = f"s{number}"
        client, moment = new_client(), rng.choice((0.0, 0.05, 0.1, 0.15))
        (await client.ask(routers[0], 120, 2, session_id=session_id)).cancel()

        async def come_back(client: Any = client, moment: float = moment) -> None:
            await asyncio.sleep(moment + rng.uniform(0, 0.005))
            await client.come_back(rng.choice(routers))

        async def next_turn(session_id: str = session_id, moment: float = moment) -> str:
            await asyncio.sleep(moment + rng.uniform(0, 0.005))
            try:
                await new_client().ask(routers[1], 2, session_id=session_id)
            except grpc.aio.AioRpcError as failure:
                return error_from_rpc(failure).reason
            return ""

        async with asyncio.timeout(30):
            _, reason = await asyncio.gather(come_back(), next_turn())
        stored = await messages(routers[0], session_id)
        if client.seen.reasons == {0: inference.FINISH_REASON_CANCELLED}:
            assert reason == ""
            assert stored[-2:] == ["hello", text(2)]
            assert len(stored) == 2 or (len(stored) == 4 and text(120).startswith(stored[1]))
        else:
            assert client.seen.tokens == {0: whole(120)}
            assert stored[:2] == ["hello", text(120)]
            assert reason == "SESSION_BUSY" or stored[2:] == ["hello", text(2)]
