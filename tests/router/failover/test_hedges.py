"""Hedges have a budget, and a cluster that is slow as a whole gets none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.router.failover.hedges import HedgeBudget, HedgePolicy
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

TOKENS = 60


async def answer(client: Any, tokens: int = TOKENS) -> list[int]:
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")], sampling=inference.SamplingParams(max_tokens=tokens)
    )
    got: list[int] = []
    async for response in client.inference.StreamChat(inference.StreamChatRequest(chat=chat)):
        if response.event.HasField("delta"):
            assert response.event.delta.first_index == len(got), "a gap or a repeat"
            got.extend(response.event.delta.token_ids)
    return got


def hedges(client: Any, outcome: str) -> float:
    return client.value("hedges_total", outcome=outcome)


@pytest.mark.parametrize("bound", [(0.25, 2, 3), (0.1, 4, 4), (0.0, 1, 1), (1.0, 0, 12)])
@pytest.mark.long
async def test_at_most_a_share_of_the_running_generations_has_a_hedge_and_the_others_get_theirs_later(
    start_node: Any, start_router: Any, until: Any, bound: tuple[float, int, int]
) -> None:
    share, least, allowed = bound
    slow = await start_node("slow", step_s=0.01)
    backup = await start_node("backup", state=worker.NODE_STATE_STARTING, stalled=True)
    client = await start_router(
        slow,
        backup,
        ready_nodes=1,
        tuning={"hedges": {"share": share, "least": least}, "suspicion": {"grace_s": 60.0, "stall_s": 60.0}},
    )
    answers = [asyncio.create_task(answer(client)) for _ in range(12)]
    await until(lambda: slow.num_running == 12)
    backup.state = worker.NODE_STATE_READY
    await until(lambda: client.router.core.models()[0].ready_nodes == 2)
    slow.frozen = True
    await until(lambda: hedges(client, "started") + hedges(client, "over_budget") >= 12)
    await asyncio.sleep(0.3)
    assert (hedges(client, "started"), hedges(client, "over_budget")) == (allowed, 12 - allowed)
    assert client.value("hedges_running") == allowed
    backup.stalled = False
    assert await asyncio.gather(*answers) == [[1000 + index for index in range(TOKENS)]] * 12
    assert hedges(client, "won") == hedges(client, "started") == 12
    assert client.value("hedges_running") == 0


async def test_a_generation_that_no_longer_needs_its_hedge_does_not_start_one(
    start_node: Any, start_router: Any, until: Any
) -> None:
    slow = await start_node("slow", step_s=0.01)
    backup = await start_node("backup", state=worker.NODE_STATE_STARTING, stalled=True)
    client = await start_router(
        slow,
        backup,
        ready_nodes=1,
        tuning={"hedges": {"share": 0.0, "least": 1}, "suspicion": {"grace_s": 60.0, "stall_s": 60.0}},
    )
    answers = [asyncio.create_task(answer(client)) for _ in range(4)]
    await until(lambda: slow.num_running == 4)
    backup.state = worker.NODE_STATE_READY
    await until(lambda: client.router.core.models()[0].ready_nodes == 2)
    slow.frozen = True
    await until(lambda: hedges(client, "over_budget") == 3)
    slow.frozen = False
    await asyncio.gather(*answers)
    assert (hedges(client, "started"), hedges(client, "false_alarm")) == (1, 1)
    assert client.value("hedges_running") == 0


@pytest.mark.long  # a machine that stalls makes one node silent before the others
async def test_when_every_node_is_silent_at_once_none_gets_a_hedge(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node(name, step_s=0.01) for name in "abc"]
    client = await start_router(*nodes, tuning={"suspicion": {"grace_s": 60.0}})
    answers = [asyncio.create_task(answer(client, 100)) for _ in range(6)]
    await until(lambda: sum(node.num_running for node in nodes) == 6)
    for node in nodes:
        node.frozen = True
    await asyncio.sleep(1.0)
    for node in nodes:
        node.frozen = False
    assert await asyncio.gather(*answers) == [[1000 + index for index in range(100)]] * 6
    assert hedges(client, "started") == 0
    assert sum(len(node.submits) for node in nodes) == 6


@given(
    st.lists(st.sampled_from(["take", "give", "run", "end", "wait"]), max_size=80),
    st.floats(0.0, 1.0),
    st.integers(0, 5),
)
def test_the_budget_holds_whatever_comes_and_nobody_waits_beside_room(actions: list[str], share: float, least: int) -> None:
    running, taken, notified = [0], 0, []
    budget = HedgeBudget(HedgePolicy(share, least), lambda: running[0], RouterTelemetry())
    for number, action in enumerate(actions):
        limit = max(least, int(share * running[0]))
        if action == "take":
            got = budget.take()
            assert got == (taken < limit)
            taken += got
        elif action == "give" and taken:
            taken -= 1
            notified.clear()
            waiting = len(budget._waiting)
            budget.give()
            assert len(notified) == min(waiting, max(0, limit - taken))
        elif action == "wait":
            budget.wait(number, lambda: True, lambda: notified.append(None))
        else:
            running[0] = max(0, running[0] + (1 if action == "run" else -1))
