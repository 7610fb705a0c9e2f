"""Several routers, one cluster, no shared map; nodes that drain, die and come back; policies by configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

SESSIONS = [f"s{i}" for i in range(12)]


async def node_of(client: Any, session_id: str) -> str:
    """Which node answers the session's next turn through this router."""
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=1),
        session_id=session_id,
    )
    async for response in client.inference.StreamChat(inference.StreamChatRequest(chat=chat)):
        if response.event.HasField("delta"):
            return str(response.event.delta.node_id)
    raise AssertionError("no token came")


async def placement(client: Any) -> dict[str, str]:
    return {session_id: await node_of(client, session_id) for session_id in SESSIONS}


@pytest.fixture
async def nodes(start_node: Any) -> dict[str, Any]:
    return {node_id: await start_node(node_id) for node_id in ("a", "b", "c")}


@pytest.mark.parametrize("policy", ["affinity", "bounded", "weighted", "prefix"])
async def test_a_session_reaches_the_same_node_through_any_router(nodes: Any, start_router: Any, policy: str) -> None:
    routers = [
        await start_router(*order, policy=policy) for order in (nodes.values(), reversed(nodes.values()), nodes.values())
    ]
    first, second, third = [await placement(router) for router in routers]
    assert first == second == third
    assert policy == "prefix" or len(set(first.values())) == 3


async def test_routers_agree_on_the_backup_and_sessions_come_back_after_a_drain(
    nodes: Any, start_router: Any, until: Any
) -> None:
    routers = [await start_router(*nodes.values(), router_id=name) for name in "xyz"]
    before = await placement(routers[0])
    nodes["a"].state = worker.NODE_STATE_DRAINING
    for router in routers:
        await until(lambda router=router: router.router.core.models()[0].ready_nodes == 2)
    during = [await placement(router) for router in routers]
    assert during[0] == during[1] == during[2]
    assert "a" not in during[0].values()
    assert all(during[0][session] == before[session] for session in SESSIONS if before[session] != "a")
    assert (
        routers[0].value("choices_total", model="demo", policy="affinity", outcome="unusable") == Counter(before.values())["a"]
    )
    nodes["a"].state = worker.NODE_STATE_READY
    for router in routers:
        await until(lambda router=router: router.router.core.models()[0].ready_nodes == 3)
        assert await placement(router) == before


async def test_under_the_bound_a_session_stays_where_its_cache_is_after_a_drain(
    nodes: Any, start_router: Any, until: Any
) -> None:
    few = len(SESSIONS) * 3 + 1  # requests below which nothing is bounded
    router = await start_router(*nodes.values(), policy="bounded", tuning={"policies": {"bound_floor": few}})
    before = await placement(router)
    nodes["a"].state = worker.NODE_STATE_DRAINING
    await until(lambda: router.router.core.models()[0].ready_nodes == 2)
    during = await placement(router)
    nodes["a"].state = worker.NODE_STATE_READY
    await until(lambda: router.router.core.models()[0].ready_nodes == 3)
    assert await placement(router) == during
    assert during != before


async def test_a_dead_nodes_sessions_count_as_unusable_and_return_with_it(nodes: Any, start_router: Any, until: Any) -> None:
    router = await start_router(*nodes.values())
    before = await placement(router)
    await nodes["b"].die()
    await until(lambda: router.value("link_up", node_id="b") == 0)
    during = await placement(router)
    lost = [session for session in SESSIONS if before[session] == "b"]
    assert lost
    assert all((during[session] != before[session]) is (session in lost) for session in SESSIONS)
    assert router.value("choices_total", model="demo", policy="affinity", outcome="unusable") == len(lost)
    await nodes["b"].start()
    await until(lambda: router.router.core.models()[0].ready_nodes == 3)
    assert await placement(router) == before


async def test_each_model_has_its_policy(start_node: Any, start_router: Any) -> None:
    large = [await start_node(name, model="large") for name in "ab"]
    small = [await start_node(name, model="small") for name in "cd"]
    router = await start_router(*large, *small, policy="round_robin", model_policy="small=affinity")

    for _ in range(6):
        for model in ("large", "small"):
            chat = inference.ChatRequest(
                model=model,
                messages=[inference.Message(role="ROLE_USER", content="hello")],
                sampling=inference.SamplingParams(max_tokens=1),
                user="u",
            )
            await router.inference.Chat(chat)
    assert [len(node.submits) for node in large] == [3, 3]
    assert sorted(len(node.submits) for node in small) == [0, 6]
    assert router.value("policy", model="large", policy="round_robin") == 1
    assert router.value("policy", model="small", policy="affinity") == 1
