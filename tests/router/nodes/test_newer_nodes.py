"""A node that is newer than its router: what the router has no name for costs no link and no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

TOKENS = 60


def chat() -> inference.StreamChatRequest:
    messages = [inference.Message(role=inference.ROLE_USER, content="hello")]
    sampling = inference.SamplingParams(max_tokens=TOKENS)
    return inference.StreamChatRequest(chat=inference.ChatRequest(messages=messages, sampling=sampling))


async def rest_of(stream: Any) -> list[inference.GenerationEvent]:
    return [response.event async for response in stream]


def tokens(events: list[inference.GenerationEvent]) -> int:
    return sum(len(event.delta.token_ids) for event in events)


async def test_an_unknown_state_ends_neither_link_nor_stream_and_takes_nothing_new(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", step_s=0.02)
    router = await start_router(node, failover_wait_s=0.2)
    stream = router.inference.StreamChat(chat())
    begun = [(await anext(aiter(stream))).event for _ in range(4)]
    node.state = 17
    await until(lambda: not router.router.links.models)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rest_of(router.inference.StreamChat(chat()))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, "no candidate"
    events = await rest_of(stream)
    assert tokens(begun) + tokens(events) == TOKENS
    assert events[-1].finished.finish_reason == inference.FINISH_REASON_LENGTH
    assert len(node.submits) == 1, "on the node that it was on"
    node.state = worker.NODE_STATE_READY
    await until(lambda: bool(router.router.links.models))
    assert tokens(await rest_of(router.inference.StreamChat(chat()))) == TOKENS
    assert router.value("link_up", node_id="a") == 1
    assert sum(router.value("link_losses_total", node_id="a", cause=cause) for cause in ("link_lost", "protocol")) == 0


async def test_a_node_that_says_hello_in_an_unknown_state_is_linked(
    start_node: Any, start_router: Any, until: Callable[..., Any]
) -> None:
    node = await start_node("a", state=17)
    router = await start_router(node, ready_nodes=0)
    await until(lambda: router.value("link_up", node_id="a") == 1)
    assert not router.router.links.models
    node.state = worker.NODE_STATE_READY
    await until(lambda: bool(router.router.links.models))


async def test_a_hello_that_makes_no_sense_does_not_end_the_link_for_good(
    start_node: Any, start_router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node("a")
    with monkeypatch.context() as odd:
        real = type(node)._beat

        def beat(self: Any, model: str) -> worker.Beat:
            beat = real(self, model)
            beat.time.CopyFrom(Timestamp(seconds=2**62, nanos=-1))
            return beat

        odd.setattr(type(node), "_beat", beat)
        router = await start_router(node, ready_nodes=1)
        assert tokens(await rest_of(router.inference.StreamChat(chat()))) == TOKENS


async def test_a_link_whose_task_fails_is_made_again(
    start_node: Any, start_router: Any, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node("a")
    router = await start_router(ready_nodes=0)
    linker = router.router.linker
    failing = True
    link_up = linker.link_up

    def fails_at_first(*arguments: Any) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise KeyError("nobody has thought of this")
        link_up(*arguments)

    monkeypatch.setattr(linker, "link_up", fails_at_first)
    linker.follow([node.address])
    await until(lambda: bool(router.router.links.models))
    assert router.value("background_task_ends_total", task="link", outcome="failed") == 1
    assert tokens(await rest_of(router.inference.StreamChat(chat()))) == TOKENS
