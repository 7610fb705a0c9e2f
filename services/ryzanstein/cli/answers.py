"""Follows one answer of a router across lost connections, and measures it as the reader sees it.

It uses the public API.

A reader that loses its stream attaches to the generation again from the first index that it has not
seen. No token is lost or repeated; `ChatAnswer` checks this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc
from ryzanstein.wire.enum_names import enum_name

MAX_REATTACHES = 5
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_GIVE_UP_TIMEOUT_S = 1.0
_LOST_CONNECTION = (Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN)


@dataclass(slots=True)
class ChatAnswer:
    """The part of an answer with one choice that has arrived. Times are of time.monotonic()."""

    asked_at: float
    generation_id: str = ""
    model: str = ""
    node_ids: list[str] = field(default_factory=list)
    """The node that accepted the request, then each node that continued it."""
    text: str = ""
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_lost: int = 0
    num_repeated: int = 0
    num_reattaches: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When each delta arrived."""
    finish_reason: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)

    @property
    def time_to_first_token_s(self) -> float | None:
        return self.arrivals[0] - self.asked_at if self.arrivals else None

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the rate from the request to the last token.

        So tokens that arrive in a burst do not make it look faster.
        """
        return len(self.token_ids) / (self.arrivals[-1] - self.asked_at) if self.arrivals else None

    @property
    def longest_gap_s(self) -> float:
        """Returns the longest silence between two deltas."""
        return max((late - early for early, late in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)

    def apply(self, event: pb.GenerationEvent) -> None:
        match event.WhichOneof("kind"):
            case "started":
                self.generation_id, self.model = event.started.generation_id, event.started.model
                self._note_node(event.started.node_id)
            case "delta":
                self._apply_delta(event.delta)
            case "finished":
                self.text += event.finished.text
                self._apply_calls(event.finished.tool_calls)
                self.finish_reason = enum_name(pb.FinishReason, event.finished.finish_reason)
                self.usage = event.finished.usage

    def _apply_delta(self, delta: pb.GenerationDelta) -> None:
        """Counts tokens that are missing or repeated, against the next expected index."""
        expected = len(self.token_ids) + self.num_lost
        self.num_lost += max(0, delta.first_index - expected)
        self.num_repeated += max(0, expected - delta.first_index)
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self._apply_calls(delta.tool_calls)
        self.arrivals.append(time.monotonic())
        self._note_node(delta.node_id)

    def _apply_calls(self, pieces: Iterable[pb.ToolCallDelta]) -> None:
        for piece in pieces:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(pb.ToolCall(id=piece.id, name=piece.name))
            self.tool_calls[piece.index].arguments += piece.arguments

    def _note_node(self, node_id: str) -> None:
        if node_id and node_id not in self.node_ids[-1:]:
            self.node_ids.append(node_id)


def visible(event: pb.GenerationEvent) -> str:
    """Returns what an event says, for people: content, and calls as they are written."""
    if event.WhichOneof("kind") not in ("delta", "finished"):
        return ""
    message = event.delta if event.HasField("delta") else event.finished
    calls = (f"\n{piece.name} {piece.arguments}" if piece.id else piece.arguments for piece in message.tool_calls)
    return message.text + "".join(calls)


EventCall = (
    grpc.aio.UnaryStreamCall[pb.StreamChatRequest, pb.StreamChatResponse]
    | grpc.aio.UnaryStreamCall[pb.AttachGenerationRequest, pb.AttachGenerationResponse]
)
Progress = Callable[[ChatAnswer, pb.GenerationEvent], None]


def _ignore(answer: ChatAnswer, event: pb.GenerationEvent) -> None:
    """Ignores the event, for a caller that needs only the whole answer."""


async def ask(
    channel: grpc.aio.Channel,
    request: pb.ChatRequest,
    on_event: Progress = _ignore,
    timeout_s: float | None = None,
) -> ChatAnswer:
    """Streams the answer and calls `on_event` after each event. Raises RyzansteinError.

    If the stream breaks after the answer began, it continues with AttachGeneration, at most
    MAX_REATTACHES times in a row. On cancellation the generation is cancelled too, because nobody
    will read it.
    """
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    answer = ChatAnswer(asked_at=time.monotonic())
    try:
        await _follow(stub, request, answer, on_event, timeout_s)
    except asyncio.CancelledError:
        await _give_up(stub, answer)
        raise
    return answer


async def _follow(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    request: pb.ChatRequest,
    answer: ChatAnswer,
    on_event: Progress,
    timeout_s: float | None,
) -> None:
    """Reads until the answer is complete, over as many streams as it takes."""
    events = _events(stub.StreamChat(pb.StreamChatRequest(chat=request), timeout=timeout_s))
    failures = 0
    while True:
        seen = len(answer.token_ids)
        try:
            async for event in events:
                answer.apply(event)
                on_event(answer, event)
            return
        except RyzansteinError as error:
            failures = 1 if len(answer.token_ids) > seen else failures + 1
            if not _may_attach(answer, error) or failures > MAX_REATTACHES:
                raise
        await asyncio.sleep(min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (failures - 1)))
        answer.num_reattaches += 1
        attach = pb.AttachGenerationRequest(generation_id=answer.generation_id, from_index={0: len(answer.token_ids)})
        events = _events(stub.AttachGeneration(attach, timeout=timeout_s))


async def _give_up(stub: inference_pb2_grpc.InferenceServiceAsyncStub, answer: ChatAnswer) -> None:
    if answer.generation_id and not answer.finish_reason:
        with suppress(grpc.aio.AioRpcError):  # it may have ended in the meantime
            await stub.CancelGeneration(
                pb.CancelGenerationRequest(generation_id=answer.generation_id), timeout=_GIVE_UP_TIMEOUT_S
            )


def _may_attach(answer: ChatAnswer, error: RyzansteinError) -> bool:
    """Returns whether the answer began and the connection failed.

    An error of the cluster itself has its own reason.
    """
    return bool(answer.generation_id) and error.code in _LOST_CONNECTION and error.reason == error.code.name


async def _events(call: EventCall) -> AsyncIterator[pb.GenerationEvent]:
    try:
        async for response in call:
            yield response.event
    except grpc.aio.AioRpcError as failure:
        raise error_from_rpc(failure) from failure
    finally:
        call.cancel()
