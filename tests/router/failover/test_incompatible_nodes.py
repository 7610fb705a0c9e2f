"""Nodes that compute other tokens: an answer stays with its kind as long as it can, and nothing of it is silent."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import structlog

from ryzanstein.cluster import Numerics
from ryzanstein.errors import LOGITS_NOT_FINITE, Code, RyzansteinError
from ryzanstein.router.choose.rendezvous import weight
from ryzanstein.router.nodes.compatibility import kinds_of
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

TOKENS = 24
OLD, NEW = "dtype=float32", "dtype=float32 0:window=64"


def request(tokens: int = TOKENS) -> inference.StreamChatRequest:
    chat = inference.ChatRequest(
        messages=[inference.Message(role="ROLE_USER", content="hello")],
        sampling=inference.SamplingParams(max_tokens=tokens),
        session_id="s",
    )
    return inference.StreamChatRequest(chat=chat)


async def read(client: Any, tokens: int = TOKENS) -> tuple[list[int], list[str]]:
    """Returns the indices of an answer's tokens, and which nodes generated them."""
    indices: list[int] = []
    nodes: list[str] = []
    async for response in client.inference.StreamChat(request(tokens)):
        delta = response.event.delta
        indices += [token - 1000 for token in delta.token_ids]
        if delta.token_ids and nodes[-1:] != [delta.node_id]:
            nodes.append(delta.node_id)
    return indices, nodes


def in_order(nodes: list[Any]) -> list[Any]:
    """The nodes in the order in which the session prefers them."""
    return sorted(nodes, key=lambda node: weight(b"session:s", node.node_id), reverse=True)


@pytest.fixture
async def three(start_node: Any, start_router: Any, until: Any) -> tuple[Any, Any, Any, Any]:
    """A router with three nodes in the session's order, of which the second computes otherwise."""
    nodes = [await start_node(name, step_s=0.01) for name in "abc"]
    first, second, third = in_order(nodes)
    first.numerics, second.numerics, third.numerics = OLD, NEW, OLD
    client = await start_router(*nodes)
    await until(lambda: client.value("model_kinds", model="demo") == 2)
    return client, first, second, third


async def test_an_answer_goes_on_at_a_node_of_its_kind(three: tuple[Any, Any, Any, Any]) -> None:
    client, first, _, third = three
    first.die_at = 5
    assert await read(client) == (list(range(TOKENS)), [first.node_id, third.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 0
    assert first.submits[-1].backup.node_id == third.node_id


async def test_where_none_of_its_kind_is_left_it_goes_on_elsewhere_and_is_counted(three: tuple[Any, Any, Any, Any]) -> None:
    client, first, second, third = three
    await third.die()
    first.die_at = 5
    with structlog.testing.capture_logs() as logs:
        assert await read(client) == (list(range(TOKENS)), [first.node_id, second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 1
    assert "answer continued by a node that computes other tokens" in [line["event"] for line in logs]


async def test_attempts_that_bring_no_token_are_not_counted(three: tuple[Any, Any, Any, Any], until: Any) -> None:
    client, first, second, third = three
    await third.die()
    first.die_at = 5
    second.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    reading = asyncio.create_task(read(client))
    await until(lambda: len(second.submits) >= 2)
    assert client.value("incompatible_failovers_total", model="demo") == 0
    second.refuse = None
    assert await reading == (list(range(TOKENS)), [first.node_id, second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 1


async def test_an_answer_belongs_to_the_version_that_accepted_it(three: tuple[Any, Any, Any, Any], until: Any) -> None:
    """Its node may have another one before the first token: what runs ends on the version that it began on."""
    client, first, _, third = three
    first.freeze_at = 0
    reading = asyncio.create_task(read(client))
    await until(lambda: first.num_running == 1)
    first.numerics = NEW
    await until(lambda: client.router.links.origin_of(first.node_id).numerics.computed == NEW)
    first.die_at, first.freeze_at = 5, None
    assert await reading == (list(range(TOKENS)), [first.node_id, third.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 0


async def test_a_node_of_its_kind_that_fails_it_does_not_keep_it_from_the_others(three: tuple[Any, Any, Any, Any]) -> None:
    client, first, second, third = three
    first.die_at = 5
    third.refuse = RyzansteinError("not finite", Code.INTERNAL, LOGITS_NOT_FINITE)
    assert await read(client) == (list(range(TOKENS)), [first.node_id, second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 1
    assert len(third.submits) == 1


async def test_a_full_node_of_its_kind_is_waited_for(three: tuple[Any, Any, Any, Any], until: Any) -> None:
    client, first, second, third = three
    first.die_at = 5
    third.refuse = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    before = len(second.submits)
    reading = asyncio.create_task(read(client))
    await until(lambda: len(third.submits) == 1)
    third.refuse = None
    assert await reading == (list(range(TOKENS)), [first.node_id, third.node_id])
    assert len(second.submits) == before


async def test_before_its_first_token_an_answer_belongs_to_no_kind(three: tuple[Any, Any, Any, Any]) -> None:
    client, first, second, _ = three
    first.die_at = 0
    assert await read(client) == (list(range(TOKENS)), [second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 0


async def test_a_hedge_starts_only_at_a_node_of_its_kind(three: tuple[Any, Any, Any, Any], until: Any) -> None:
    client, first, second, third = three
    before = len(second.submits)
    reading = asyncio.create_task(read(client, 60))
    await until(lambda: first.num_running == 1 and first._step > 5)
    first.frozen = True
    assert (await reading)[1] == [first.node_id, third.node_id]
    assert len(second.submits) == before


async def test_who_asks_for_it_never_gets_an_answer_of_two_kinds(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node(name, step_s=0.01, digest=name.encode() * 32) for name in "ab"]
    client = await start_router(*nodes, failover_to_incompatible=False, failover_wait_s=0.5)
    await until(lambda: client.value("model_kinds", model="demo") == 2)
    for node in nodes:
        node.die_at = 5
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read(client)
    assert error_from_rpc(failed.value).reason == "NO_NODES"
    assert sum(len(node.submits) for node in nodes) == 1


@pytest.mark.parametrize("older", [{"numerics": ""}, {"digest": b""}])
async def test_a_node_that_does_not_say_how_it_computes_counts_as_alike(
    start_node: Any, start_router: Any, until: Any, older: dict[str, Any]
) -> None:
    new = {"numerics": OLD, "digest": b"a" * 32}
    nodes = [await start_node("a", **new), await start_node("b", **{**new, **older})]
    client = await start_router(*nodes)
    await until(lambda: client.value("model_kinds", model="demo") == 1)
    first, second = in_order(nodes)
    first.die_at = 5
    assert await read(client) == (list(range(TOKENS)), [first.node_id, second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 0


async def test_contexts_of_other_lengths_are_shown(start_node: Any, start_router: Any, until: Any) -> None:
    client = await start_router(await start_node("a"), await start_node("b", context_length=512))
    await until(lambda: client.value("model_contexts", model="demo") == 2)
    assert client.value("model_kinds", model="demo") == 1


@dataclass
class Node:
    numerics: Numerics


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_kinds_do_not_depend_on_the_order_of_nodes(order: tuple[int, ...]) -> None:
    """A node whose weights are not known yet hides nothing."""
    nodes = [Node(Numerics("x")), Node(Numerics("x", b"1")), Node(Numerics("x", b"2"))]
    assert len(kinds_of([nodes[i] for i in order])) == 2
