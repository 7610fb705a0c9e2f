"""Requests to fill in the middle: which node is asked, how long they wait, and that none is cut.

What is in such a prompt's own middle says where the answer goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ryzanstein import clock
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import CONSTRAINTS, PROMPT_CUTS, GenerationRequest, SamplingParams
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker


def asked(**sampling: Any) -> inference.CompleteRequest:
    return inference.CompleteRequest(text="a", suffix="z", sampling=inference.SamplingParams(max_tokens=2, **sampling))


async def refusal(call: Any) -> RyzansteinError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return error_from_rpc(refused.value)


async def test_the_default_of_the_router_cuts_none(start_node: Any, start_router: Any) -> None:
    node = await start_node("a", features=(CONSTRAINTS, PROMPT_CUTS))
    client = await start_router(node, keep_prompt_head=0)
    await client.inference.Complete(asked())
    (submit,) = node.submits
    assert (list(submit.token_ids.ids), list(submit.sampling.stop_token_ids)) == ([1, 2, 3], [4])
    assert not submit.sampling.HasField("keep_prompt_head")


@pytest.mark.parametrize("name", ["keep_prompt_head", "truncate_prompt_tokens"])
async def test_a_request_to_cut_one_is_refused(start_node: Any, start_router: Any, name: str) -> None:
    client = await start_router(await start_node("a"))
    refused = await refusal(client.inference.Complete(asked(**{name: 1})))
    assert [each.field for each in refused.violations] == [f"sampling.{name}"]


async def test_it_waits_for_a_node_that_is_not_ready_yet(start_node: Any, start_router: Any, until: Callable[..., Any]) -> None:
    node = await start_node("a", state=worker.NODE_STATE_RECOVERING)
    client = await start_router(node, ready_nodes=0)
    await until(lambda: client.value("link_up", node_id="a") == 1)
    answer = asyncio.ensure_future(client.inference.Complete(asked()))
    await asyncio.sleep(0.3)
    assert not answer.done()
    assert not node.fills
    node.state = worker.NODE_STATE_READY
    assert (await answer).usage.completion_tokens == 2
    assert client.router.core._admission.entering("demo") == 0


async def test_it_waits_no_longer_than_any_request(start_node: Any, start_router: Any, until: Callable[..., Any]) -> None:
    node = await start_node("a", state=worker.NODE_STATE_RECOVERING)
    client = await start_router(node, ready_nodes=0, failover_wait_s=0.3)
    await until(lambda: client.value("link_up", node_id="a") == 1)
    began = time.monotonic()
    assert (await refusal(client.inference.Complete(asked()))).reason == "NO_NODES"
    assert 0.3 <= time.monotonic() - began < 3
    assert client.router.core._admission.running == 0


async def test_those_that_wait_count_against_the_bound_on_waiting(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", state=worker.NODE_STATE_RECOVERING)
    client = await start_router(node, ready_nodes=0, max_waiting=1)
    await until(lambda: client.value("link_up", node_id="a") == 1)
    first = asyncio.ensure_future(client.inference.Complete(asked()))
    await until(lambda: client.router.core._admission.entering("demo") == 1)
    assert (await refusal(client.inference.Complete(asked()))).reason == "QUEUE_FULL"
    first.cancel()
    await until(lambda: client.router.core._admission.running == 0)
    assert client.router.core._admission.entering("demo") == 0


@pytest.mark.parametrize("answers", [True, False], ids=["no node is ready", "the node does not answer"])
async def test_its_own_deadline_holds_while_the_prompt_is_made(
    start_node: Any, start_router: Any, until: Callable[..., Any], answers: bool
) -> None:
    node = await start_node("a")
    client = await start_router(node, tuning={"suspicion": {"grace_s": 60.0}})
    if answers:
        node.state = worker.NODE_STATE_RECOVERING
        await until(lambda: not client.router.core.ready)
    else:
        node.frozen = True
    request = GenerationRequest("demo", TextPrompt("a", "z"), SamplingParams(), deadline=clock.unix_s() + 0.3)
    began = time.monotonic()
    with pytest.raises(RyzansteinError) as late:
        await client.router.core.submit(request)
    assert (late.value.code, time.monotonic() - began < 3) == (Code.DEADLINE_EXCEEDED, True)
    assert client.router.core._admission.running == client.router.core._admission.entering("demo") == 0
    node.frozen = False


async def test_a_node_that_is_lost_meanwhile_is_not_the_clients_concern(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    nodes = [await start_node(name) for name in "ab"]
    client = await start_router(*nodes, tuning={"suspicion": {"grace_s": 60.0}})
    for node in nodes:
        node.frozen = True
    answer = asyncio.ensure_future(client.inference.Complete(asked()))
    await until(lambda: any(node.fills for node in nodes))
    (asked_first,) = (node for node in nodes if node.fills)
    (other,) = (node for node in nodes if not node.fills)
    other.frozen = False
    await asked_first.die()
    assert (await answer).usage.completion_tokens == 2
    assert [len(node.fills) for node in (asked_first, other)] == [1, 1]
    asked_first.frozen = False


async def test_nodes_of_an_older_version_are_passed_over(start_node: Any, start_router: Any) -> None:
    older = [await start_node(f"older-{i}", knows_infill=False) for i in range(6)]
    newer = await start_node("the-newer")
    client = await start_router(*older, newer)
    await client.inference.Complete(asked())
    assert len(newer.fills) == 1
    await newer.die()
    refused = await refusal(client.inference.Complete(asked()))
    assert (refused.code, refused.reason) == (Code.UNIMPLEMENTED, "NODES_TOO_OLD")


async def test_it_fails_at_once_when_all_nodes_drain(start_node: Any, start_router: Any, until: Callable[..., Any]) -> None:
    node = await start_node("a")
    client = await start_router(node)
    client.router.linker.follow([node.address], draining=["a"])
    refused = await refusal(client.inference.Complete(asked()))
    assert (refused.reason, refused.metadata["cause"]) == ("NO_NODES", "draining")
