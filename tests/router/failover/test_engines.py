"""Engines of others: a request goes where all of it is supported, and what is continued inexactly is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import structlog
from tests.router.failover.asking import TOKENS, read, request

from ryzanstein.errors import Code, RyzansteinError, engine_lacks
from ryzanstein.router.choose.rendezvous import weight
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference

LLAMA = {"engine": "llama.cpp b7200", "inexact": True}


async def refusal(client: Any, asked: inference.StreamChatRequest) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read(client, asked)
    return error_from_rpc(failed.value)


def in_order(nodes: list[Any], session_id: str = "s") -> list[Any]:
    """The nodes in the order in which the session prefers them."""
    return sorted(nodes, key=lambda node: weight(b"session:" + session_id.encode(), node.node_id), reverse=True)


async def test_a_request_goes_only_to_engines_that_support_all_of_it(start_node: Any, start_router: Any) -> None:
    foreign = await start_node("foreign", unsupported=("presence_penalty", "constraint"), **LLAMA)
    own = await start_node("own")
    client = await start_router(foreign, own)
    for session in "abcdef":
        assert (await read(client, request(session, 2, presence_penalty=1)))[1] == ["own"]
        assert (await read(client, request(session, 2, constraint=inference.Constraint(regex="[0-9]+"))))[1] == ["own"]
    assert foreign.submits == []
    assert {(await read(client, request(session, 2, top_p=0.5)))[1][0] for session in "abcdefgh"} == {"foreign", "own"}


async def test_what_no_engine_supports_is_refused_at_once_by_its_name(start_node: Any, start_router: Any) -> None:
    node = await start_node("a", unsupported=("min_p", "constraint"), **LLAMA)
    client = await start_router(node)
    error = await refusal(client, request(min_p=0.1))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ENGINE_LACKS")
    assert error.metadata == {"model": "demo", "field": "sampling.min_p", "engine": "llama.cpp b7200"}
    assert [each.field for each in error.violations] == ["sampling.min_p"]
    assert (await refusal(client, request(constraint=inference.Constraint(regex="a")))).metadata[
        "field"
    ] == "sampling.constraint"
    assert client.value("failovers_exhausted_total", cause="engine_lacks") == 2
    assert node.submits == []
    assert (await read(client, request()))[0] == list(range(TOKENS))


async def test_engines_that_together_support_it_but_none_alone_refuse_it_by_name(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node("a", unsupported=("min_p",)), await start_node("b", unsupported=("top_k",))]
    client = await start_router(*nodes)
    assert (await refusal(client, request(min_p=0.1, top_k=5))).metadata["field"] == "sampling.top_k"
    assert (await read(client, request(tokens=2, min_p=0.1)))[1] == ["b"]


async def test_the_models_own_value_of_what_an_engine_does_not_support_is_not_used(start_node: Any, start_router: Any) -> None:
    own = {"repetition_penalty": 1.5, "top_k": 20}
    nodes = [await start_node("a", unsupported=("repetition_penalty",), sampling_defaults=own)]
    nodes.append(await start_node("b", sampling_defaults=own))
    client = await start_router(*nodes)
    for session in "abcdefgh":
        await read(client, request(session, 2))
    submits = [submit for node in nodes for submit in node.submits]
    assert len(submits) == 8
    assert all(node.submits for node in nodes)
    assert {(submit.sampling.repetition_penalty, submit.sampling.top_k) for submit in submits} == {(1.0, 20)}
    assert (await read(client, request(tokens=2, repetition_penalty=1.5)))[1] == ["b"]


async def test_the_context_of_an_engine_that_cannot_do_it_is_not_waited_for(start_node: Any, start_router: Any) -> None:
    large = await start_node("large", unsupported=("min_p",), context_length=8192)
    small = await start_node("small", refuse=RyzansteinError("too long", Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG"))
    client = await start_router(large, small)
    async with asyncio.timeout(5):
        assert (await refusal(client, request(min_p=0.1))).reason == "CONTEXT_TOO_LONG"
    assert (await read(client, request()))[1] == ["large"]


async def test_while_an_able_node_is_away_a_request_waits_for_it(start_node: Any, start_router: Any, until: Any) -> None:
    foreign, own = await start_node("foreign", unsupported=("min_p",)), await start_node("own")
    client = await start_router(foreign, own)
    await own.die()
    await until(lambda: client.value("link_up", node_id="own") == 0)
    reading = asyncio.create_task(read(client, request(min_p=0.1)))
    await asyncio.sleep(0.3)
    assert not reading.done()
    await own.start()
    assert await reading == (list(range(TOKENS)), ["own"])


async def test_a_node_that_refuses_although_it_did_not_say_so_is_passed_over(start_node: Any, start_router: Any) -> None:
    """Its engine came back as another one between two beats."""
    nodes = [await start_node(name) for name in "ab"]
    first, second = in_order(nodes)
    first.refuse = engine_lacks("demo", "sampling.min_p", "llama.cpp b7200")
    client = await start_router(*nodes)
    assert (await read(client, request(min_p=0.1)))[1] == [second.node_id]
    second.refuse = first.refuse
    error = await refusal(client, request(min_p=0.1))
    assert (error.reason, [each.field for each in error.violations]) == ("ENGINE_LACKS", ["sampling.min_p"])


async def test_an_inexact_engine_continues_nothing_as_it_was_also_not_what_it_began(
    start_node: Any, start_router: Any, until: Any
) -> None:
    node = await start_node("a", **LLAMA)
    client = await start_router(node)
    node.die_at = 5
    with structlog.testing.capture_logs() as logs:
        reading = asyncio.create_task(read(client, request()))
        await until(lambda: node._server is None)
        await node.start()
        assert await reading == (list(range(TOKENS)), ["a"])
    assert client.value("incompatible_failovers_total", model="demo") == 1
    (said,) = [line for line in logs if line["event"] == "answer continued by a node that computes other tokens"]
    assert said["exact"] is False


@pytest.mark.parametrize("inexact_first", [True, False])
async def test_from_and_to_an_inexact_engine_is_counted(start_node: Any, start_router: Any, inexact_first: bool) -> None:
    nodes = [await start_node(name) for name in "ab"]
    first, second = in_order(nodes)
    (first if inexact_first else second).inexact = True
    first.die_at = 5
    client = await start_router(*nodes)
    assert await read(client, request()) == (list(range(TOKENS)), [first.node_id, second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 1


async def test_without_a_token_an_inexact_engine_is_tried_again_like_any_other(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node(name, **LLAMA) for name in "ab"]
    first, second = in_order(nodes)
    first.die_at = 0
    client = await start_router(*nodes, failover_to_incompatible=False)
    assert await read(client, request()) == (list(range(TOKENS)), [second.node_id])
    assert client.value("incompatible_failovers_total", model="demo") == 0


async def test_who_asks_for_it_gets_no_inexact_continuation(start_node: Any, start_router: Any) -> None:
    nodes = [await start_node(name, **LLAMA) for name in "ab"]
    first, second = in_order(nodes)
    first.die_at = 5
    client = await start_router(*nodes, failover_to_incompatible=False, failover_wait_s=0.5)
    assert (await refusal(client, request())).reason == "NO_NODES"
    assert second.submits == []


async def test_an_answer_of_an_inexact_engine_is_never_hedged(start_node: Any, start_router: Any, until: Any) -> None:
    nodes = [await start_node(name, step_s=0.01, **LLAMA) for name in "ab"]
    client = await start_router(*nodes)
    first, second = in_order(nodes)
    reading = asyncio.create_task(read(client, request(tokens=60)))
    await until(lambda: first.num_running == 1 and first._step > 5)
    first.mute_beats = first.stalled = True
    await until(lambda: client.value("node_suspected", node_id=first.node_id) == 1)
    await asyncio.sleep(0.2)
    assert second.submits == []
    first.mute_beats = first.stalled = False
    assert (await reading)[0] == list(range(60))
    assert client.value("hedges_total", outcome="started") in (0, None)


async def test_a_pause_of_one_attempt_is_no_continuation(start_node: Any, start_router: Any, until: Any) -> None:
    """The same attempt that works again after an alarm is not counted, though its engine continues inexactly."""
    node = await start_node("a", **LLAMA)
    node.freeze_at = 5
    client = await start_router(node, tuning={"patience": {"accept_s": 0.5, "silence_s": 1.0}})
    reading = asyncio.create_task(read(client, request()))
    await until(lambda: node.num_running == 1)
    await asyncio.sleep(1.75)  # alarmed after 1 to 1.5 s, given up after 2 s
    node.freeze_at = None
    assert await reading == (list(range(TOKENS)), ["a"])
    assert len(node.submits) == 1
    assert client.value("incompatible_failovers_total", model="demo") == 0


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        (({"engine": "vllm 1"}, {"engine": ""}), 1),
        (({"engine": "vllm 1"}, {"engine": "vllm 2"}), 2),
        (({"reserve": True}, {}), 1),
        (({}, {}), 2),
    ],
)
async def test_nodes_are_compared_with_those_of_the_same_engine_and_purpose(
    start_node: Any, start_router: Any, until: Any, given: tuple[dict[str, Any], ...], kinds: int
) -> None:
    nodes = [await start_node(name, numerics=f"dtype={name}", **each) for name, each in zip("ab", given, strict=True)]
    client = await start_router(*nodes)
    await until(lambda: len(client.router.links.snapshot()) == 2)
    await until(lambda: client.value("model_contexts", model="demo") == 1)
    assert client.value("model_kinds", model="demo") == kinds
