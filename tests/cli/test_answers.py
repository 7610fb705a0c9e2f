"""Following one answer over real connections that break in ways a healthy router does not offer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ryzanstein import errors
from ryzanstein.cli.answers import MAX_REATTACHES, ChatAnswer, ask
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

TOKENS = tuple(range(100, 112))


def delta(first_index: int, *token_ids: int) -> pb.GenerationEvent:
    text = "".join(f"{token_id} " for token_id in token_ids)
    return pb.GenerationEvent(
        delta=pb.GenerationDelta(first_index=first_index, token_ids=token_ids, text=text, node_id="node-0")
    )


class BreakingRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Gives TOKENS one by one; each stream breaks after `per_stream` tokens. The first time `error` says how."""

    def __init__(self, per_stream: int, error: RyzansteinError | None = None) -> None:
        self.per_stream = per_stream
        self.error = error
        self.attached_from: list[int] = []
        self.cancelled: list[str] = []

    async def StreamChat(self, request: pb.StreamChatRequest, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
        async for event in self._events(0, context):
            yield pb.StreamChatResponse(event=event)

    async def AttachGeneration(
        self, request: pb.AttachGenerationRequest, context: Any
    ) -> AsyncIterator[pb.AttachGenerationResponse]:
        self.attached_from.append(request.from_index[0])
        async for event in self._events(request.from_index[0], context):
            yield pb.AttachGenerationResponse(event=event)

    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Any) -> pb.CancelGenerationResponse:
        self.cancelled.append(request.generation_id)
        return pb.CancelGenerationResponse()

    async def _events(self, first_index: int, context: Any) -> AsyncIterator[pb.GenerationEvent]:
        yield pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", model="m", node_id="node-0"))
        for index in range(first_index, min(len(TOKENS), first_index + self.per_stream)):
            yield delta(index, TOKENS[index])
        if first_index + self.per_stream < len(TOKENS):
            if self.error is not None:
                raise self.error
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        yield pb.GenerationEvent(finished=pb.GenerationFinished(finish_reason=pb.FINISH_REASON_STOP))


async def ask_of(router: BreakingRouter, **options: Any) -> ChatAnswer:
    server = RpcServer("127.0.0.1", 0, ())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server.server)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            return await ask(channel, pb.ChatRequest(), **options)
    finally:
        await server.stop(0)


async def test_a_broken_stream_is_taken_up_again_at_the_first_index_not_seen() -> None:
    router = BreakingRouter(per_stream=5)
    answer = await ask_of(router)
    assert router.attached_from == [5, 10]
    assert tuple(answer.token_ids) == TOKENS
    assert answer.text == "".join(f"{token_id} " for token_id in TOKENS)
    assert (answer.num_lost, answer.num_repeated, answer.num_reattaches, answer.finish_reason) == (0, 0, 2, "stop")


async def test_attaching_is_given_up_when_it_brings_nothing() -> None:
    router = BreakingRouter(per_stream=0)
    with pytest.raises(RyzansteinError, match="connection reset"):
        await ask_of(router)
    assert router.attached_from == [0] * MAX_REATTACHES


async def test_an_error_that_the_cluster_means_is_not_taken_for_a_lost_connection() -> None:
    router = BreakingRouter(per_stream=3, error=errors.no_nodes("m", "all are gone"))
    with pytest.raises(RyzansteinError) as failed:
        await ask_of(router)
    assert (failed.value.code, failed.value.reason, router.attached_from) == (Code.UNAVAILABLE, "NO_NODES", [])


async def test_who_stops_reading_cancels_the_generation() -> None:
    router = BreakingRouter(per_stream=len(TOKENS))
    reading = asyncio.Event()

    def on_event(answer: ChatAnswer, event: pb.GenerationEvent) -> None:
        reading.set()
        if answer.token_ids:
            asking.cancel()

    asking = asyncio.create_task(ask_of(router, on_event=on_event))
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert reading.is_set()
    assert router.cancelled == ["g"]


def test_missing_and_repeated_indices_are_counted() -> None:
    answer = ChatAnswer(asked_at=0.0)
    for event in (delta(0, 7, 8), delta(1, 8, 9), delta(6, 10)):
        answer.apply(event)
    assert (answer.num_repeated, answer.num_lost) == (1, 2)


def test_the_rate_is_over_the_whole_wait() -> None:
    answer = ChatAnswer(asked_at=10.0)
    for first_index in range(3):
        answer.apply(delta(first_index, 1))
    answer.arrivals[:] = [12.0, 12.5, 13.0]
    assert (answer.time_to_first_token_s, answer.tokens_per_s) == (2.0, 1.0)
