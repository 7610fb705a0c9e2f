"""A reserve node gets nothing while another has room, continues what no other can, and gives the conversation back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.router.failover.asking import TOKENS, read, request

from ryzanstein.errors import Code, RyzansteinError


@pytest.mark.parametrize("policy", ["affinity", "bounded", "weighted", "prefix", "least_loaded", "round_robin"])
async def test_the_reserve_continues_an_answer_and_the_next_turn_goes_back(
    start_node: Any, start_router: Any, until: Any, policy: str
) -> None:
    gpu, cpu = await start_node("gpu", step_s=0.01), await start_node("cpu", reserve=True)
    client = await start_router(gpu, cpu, policy=policy)
    for session in "abcdefgh":
        assert (await read(client, request(session, 2)))[1] == ["gpu"]
    assert cpu.submits == []
    gpu.die_at = 5
    assert await read(client, request()) == (list(range(TOKENS)), ["gpu", "cpu"])
    assert (await read(client, request("t")))[1] == ["cpu"]
    await gpu.start()
    await until(lambda: client.value("link_up", node_id="gpu") == 1)
    for session in "stst":
        assert (await read(client, request(session, 2)))[1] == ["gpu"]
    assert client.value("choices_total", model="demo", policy=policy, outcome="reserve") == 2


async def test_the_reserve_answers_when_the_others_have_no_room(start_node: Any, start_router: Any) -> None:
    gpu, cpu = await start_node("gpu"), await start_node("cpu", reserve=True)
    client = await start_router(gpu, cpu)
    gpu.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (await read(client, request()))[1] == ["cpu"]
    gpu.refuse = None
    assert (await read(client, request()))[1] == ["gpu"]


async def test_the_reserve_gets_no_hedge_of_a_node_that_works_for_others(start_node: Any, start_router: Any) -> None:
    """Its node is well. Once that has forgotten the attempt, the reserve continues it."""
    gpu, cpu = await start_node("gpu"), await start_node("cpu", reserve=True)
    gpu.freeze_at = 5
    client = await start_router(gpu, cpu, tuning={"patience": {"accept_s": 0.2, "silence_s": 0.3}})
    assert await read(client, request()) == (list(range(TOKENS)), ["gpu", "cpu"])
    assert client.value("hedges_total", outcome="started") == 0
    assert client.value("failovers_total", cause="no_progress") == 1


async def test_a_suspected_node_is_hedged_at_the_reserve_where_there_is_no_other(
    start_node: Any, start_router: Any, until: Any
) -> None:
    gpu, cpu = await start_node("gpu", step_s=0.01), await start_node("cpu", step_s=0.01, reserve=True)
    client = await start_router(gpu, cpu)
    reading = asyncio.create_task(read(client, request(tokens=60)))
    await until(lambda: gpu.num_running == 1 and gpu._step > 5)
    gpu.frozen = True
    assert await reading == (list(range(60)), ["gpu", "cpu"])


async def test_what_leaves_no_state_is_asked_of_the_reserve_last(start_node: Any, start_router: Any) -> None:
    gpu, cpu = await start_node("gpu", waiting=100), await start_node("cpu", reserve=True)
    client = await start_router(gpu, cpu)
    links = client.router.links
    assert links.least_loaded("demo").node_id == "gpu"
    assert links.least_loaded("demo", {"gpu"}).node_id == "cpu"
