"""Adapters that nodes report: which names there are, where a request may go, and that the model alone never answers instead."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.generation.request import ADAPTERS
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

ONE, TWO = b"1" * 32, b"2" * 32
TOKENS = 40


def stream_of(router: Any, model: str, tokens: int = TOKENS, **more: Any) -> Any:
    chat = inference.ChatRequest(
        model=model,
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        **more,
    )
    return router.inference.StreamChat(inference.StreamChatRequest(chat=chat), timeout=30)


async def answer(stream: Any) -> tuple[str, list[int]]:
    """The model that answers and its tokens."""
    model, tokens = "", []
    async for response in stream:
        if response.event.HasField("started"):
            model = response.event.started.model
        tokens += response.event.delta.token_ids
    return model, tokens


async def reason(stream: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answer(stream)
    return error_from_rpc(refused.value).reason


@pytest.fixture
async def nodes(start_node: Any) -> list[Any]:
    return [await start_node(name, step_s=0.005, features=(ADAPTERS,), adapters={}) for name in "abc"]


async def test_a_name_goes_to_nodes_that_have_its_content_and_to_no_other(
    nodes: list[Any], start_router: Any, until: Any
) -> None:
    router = await start_router(*nodes, failover_wait_s=0.3)
    for node in nodes[:2]:
        node.adapters = {"tuned": (ONE, 1)}
    await until(
        lambda: (
            [(each.name, each.parent, each.ready_nodes) for each in router.router.core.models()][1:] == [("tuned", "demo", 2)]
        )
    )
    for _ in range(6):
        assert await answer(stream_of(router, "tuned")) == ("tuned", [1000 + index for index in range(TOKENS)])
    submits = [submit for node in nodes for submit in node.submits]
    assert {(each.model, each.adapter.name, each.adapter.digest) for each in submits} == {("demo", "tuned", ONE)}
    assert not nodes[2].submits
    assert (await answer(stream_of(router, "demo")))[0] == "demo"
    nodes[0].adapters = {}
    nodes[1].adapters = {}
    await until(lambda: len(router.router.core.models()) == 1)
    assert await reason(stream_of(router, "tuned")) == "MODEL_NOT_FOUND"


async def test_an_answer_goes_on_where_the_content_is_the_same(nodes: list[Any], start_router: Any, until: Any) -> None:
    router = await start_router(*nodes, failover_wait_s=0.3)
    nodes[0].adapters, nodes[1].adapters, nodes[2].adapters = {"t": (ONE, 2)}, {"t": (TWO, 1)}, {"other": (ONE, 1)}
    await until(lambda: len(router.router.core.models()) == 3)
    nodes[0].freeze_at = nodes[2].freeze_at = 10
    stream = stream_of(router, "t")
    await until(lambda: any(node.num_running for node in nodes))
    first = next(node for node in nodes if node.submits)
    assert first in (nodes[0], nodes[2]), "the newer content counts"
    second = nodes[2] if first is nodes[0] else nodes[0]
    second.freeze_at = None
    await first.die()
    assert await answer(stream) == ("t", [1000 + index for index in range(TOKENS)])
    assert len(second.submits) == 1
    assert not nodes[1].submits


async def test_where_no_node_has_the_content_any_more_nothing_answers(nodes: list[Any], start_router: Any, until: Any) -> None:
    router = await start_router(*nodes, failover_wait_s=0.3)
    nodes[0].adapters = {"t": (ONE, 1)}
    await until(lambda: len(router.router.core.models()) == 2)
    nodes[0].freeze_at = 10
    stream = stream_of(router, "t")
    await until(lambda: nodes[0].num_running)
    await nodes[0].die()
    assert await reason(stream) == "NO_NODES"
    assert not nodes[1].submits
    assert not nodes[2].submits


async def test_a_request_that_waits_when_its_adapter_is_removed_is_told_so(
    nodes: list[Any], start_router: Any, until: Any
) -> None:
    router = await start_router(*nodes, failover_wait_s=20)
    nodes[0].adapters = {"t": (ONE, 1)}
    await until(lambda: len(router.router.core.models()) == 2)
    nodes[0].ranks_lost = True
    await until(lambda: router.router.core.models()[0].ready_nodes == 2)
    stream = stream_of(router, "t")
    await until(router.router.core.requests)
    nodes[0].adapters, nodes[0].ranks_lost = {}, False
    assert await reason(stream) == "ADAPTER_REMOVED"


async def test_a_request_that_arrives_when_its_adapter_is_removed_is_told_so(
    nodes: list[Any], start_router: Any, until: Any
) -> None:
    router = await start_router(*nodes, failover_wait_s=60)
    nodes[0].adapters = {"t": (ONE, 1)}
    await until(lambda: len(router.router.core.models()) == 2)
    nodes[0].refuse = errors.unavailable("ADAPTER_NOT_SERVED", "no adapter 't' with this content")
    stream = stream_of(router, "t")
    await until(lambda: nodes[0].submits)
    nodes[0].adapters = {}
    assert await asyncio.wait_for(reason(stream), 10) == "ADAPTER_REMOVED"


async def test_an_older_node_is_never_asked_for_an_adapter(
    nodes: list[Any], start_node: Any, start_router: Any, until: Any
) -> None:
    old = await start_node("old", step_s=0.005)
    router = await start_router(*nodes, old, failover_wait_s=0.3)
    nodes[0].adapters = {"t": (ONE, 1)}
    old.adapters = {"t": (ONE, 1)}
    await until(lambda: [each.ready_nodes for each in router.router.core.models()] == [4, 2])
    for _ in range(4):
        await answer(stream_of(router, "t", 4))
    assert not old.submits


async def test_vectors_with_an_adapter_and_damaged_reports_are_refused(nodes: list[Any], start_router: Any, until: Any) -> None:
    router = await start_router(*nodes, failover_wait_s=0.3)
    nodes[0].adapters = {"t": (ONE, 1), "short": (b"1", 1), "": (ONE, 1), "demo": (ONE, 1)}
    await until(lambda: len(router.router.core.models()) == 2)
    assert [each.name for each in router.router.core.models()] == ["demo", "t"]
    assert (await answer(stream_of(router, "demo", 2)))[0] == "demo"
    assert all(not submit.HasField("adapter") for node in nodes for submit in node.submits)
