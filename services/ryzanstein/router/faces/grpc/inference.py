"""The gRPC face: converts requests from the wire, calls the core, and converts the answers.

A client that disconnects detaches from its stream. The generation waits for it, because a lost
connection looks the same as a cancelled one. Metadata `x-cancel-on-disconnect: true` cancels it at
once; `x-run-detached: true` lets it run to its end. The client of a unary call cannot re-attach, so
its disconnect cancels the generation unless it runs detached. A request with a key is not
cancelled: a client that sends it again joins the generation, and another caller may already have
done so.

Text that is more than content comes as typed parts, in streams and in whole answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.generation.tokens import Delta, Finished, GenerationEvent, Started
from ryzanstein.replies.follower import ReplyFollower
from ryzanstein.replies.reader import ReplyDelta
from ryzanstein.router.access.live import LiveCallers
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import Answer, read_start
from ryzanstein.router.faces.disconnect import Departing, ending_with_reader
from ryzanstein.router.faces.grpc.call import Calls, RpcCall
from ryzanstein.router.faces.origin import allowed_model
from ryzanstein.router.nodes.table import ServedModel
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceServicer
from ryzanstein.wire.events import event_to_wire, prompt_token_to_wire, token_logprobs_to_wire, usage_to_wire
from ryzanstein.wire.requests import (
    MostParts,
    chat_from_wire,
    complete_from_wire,
    message_to_wire,
    messages_from_wire,
    name_from_wire,
    sampling_defaults_to_wire,
)

_Response = TypeVar("_Response", inference.ChatResponse, inference.CompleteResponse)


def whole_response(kind: type[_Response], answer: Answer) -> _Response:
    """Returns the answer as a response of this kind. Both kinds have the same fields."""
    return kind(
        generation_id=answer.started.generation_id,
        model=answer.started.model,
        node_id=answer.node_id,
        choices=[_choice(answer, number) for number in sorted(answer.reasons)],
        usage=usage_to_wire(answer.usage),
        prompt=map(prompt_token_to_wire, answer.prompt),
    )


def _choice(answer: Answer, number: int) -> inference.Choice:
    tokens, message = answer.tokens[number], answer.message(number)
    return inference.Choice(
        choice=number,
        text=message.content,
        token_ids=[token.token_id for token in tokens],
        finish_reason=inference.FinishReason.ValueType(answer.reason(number, message)),
        logprobs=token_logprobs_to_wire(tokens),
        tool_calls=message_to_wire(message).tool_calls,
        reasoning=message.reasoning,
    )


class ChatEvents:
    """Writes the events of one chat as its client gets them. `seen`: the first index that it wants of each choice."""

    def __init__(self, seen: Mapping[int, int]) -> None:
        self._seen = seen
        self._replies: ReplyFollower | None = None

    def written(self, event: GenerationEvent) -> inference.GenerationEvent | None:
        """Returns the event on the wire; None: the client has seen all of it."""
        if isinstance(event, Started) and event.reply is not None:
            self._replies = ReplyFollower(event, dict(self._seen))
        elif (replies := self._replies) is not None and isinstance(event, Delta):
            num_seen = replies.num_seen(event)
            spoken = replies.read(event)
            if num_seen == len(event.tokens):
                return None
            wire = event_to_wire(event._replace(first_index=event.first_index + num_seen, tokens=event.tokens[num_seen:]))
            _say(wire.delta, spoken)
            return wire
        elif replies is not None and isinstance(event, Finished):
            spoken, reason = replies.ended(event)
            wire = event_to_wire(event)
            wire.finished.finish_reason = inference.FinishReason.ValueType(reason)
            _say(wire.finished, spoken)
            return wire
        return event_to_wire(event)


async def read_events(
    events: AsyncIterator[GenerationEvent], seen: Mapping[int, int] | None = None
) -> AsyncIterator[inference.GenerationEvent]:
    """Yields the events as a client gets them that has seen a part of them; see `ChatEvents`."""
    chat = ChatEvents(seen or {})
    async for event in events:
        if (wire := chat.written(event)) is not None:
            yield wire


async def attached(
    core: Core, generation_id: str, from_index: dict[int, int], tenant: str
) -> AsyncGenerator[inference.GenerationEvent, None]:
    """Follows a generation for a client that comes back.

    Answers with more than content are read from their beginning, also what the client has seen.
    """
    async with aclosing(core.follow(generation_id, from_index, tenant=tenant)) as events:
        started = await read_start(events)
        if started.reply is None or not any(from_index.values()):
            async for wire in read_events(_from_start(started, events), from_index):
                yield wire
            return
    async with aclosing(core.follow(generation_id, {}, tenant=tenant)) as events:
        async for wire in read_events(events, from_index):
            yield wire


async def _from_start(started: Started, events: AsyncIterator[GenerationEvent]) -> AsyncIterator[GenerationEvent]:
    yield started
    async for event in events:
        yield event


def _say(wire: inference.GenerationDelta | inference.GenerationFinished, spoken: ReplyDelta) -> None:
    wire.text, wire.reasoning = spoken.content, spoken.reasoning
    for call in spoken.calls:
        wire.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(InferenceServiceServicer):
    """`InferenceService` over a `Core`.

    A message with more parts than `most` is refused before it is converted.
    """

    def __init__(self, core: Core, calls: Calls, most: MostParts, live: LiveCallers) -> None:
        self._core = core
        self._calls = calls
        self._most = most
        self._live = live

    async def Chat(self, request: inference.ChatRequest, context: _Context) -> inference.ChatResponse:
        with self._calls.call("Chat", context) as call:
            asked = call.complete(chat_from_wire(request, self._most), request.request_id)
            return await _whole(inference.ChatResponse, await self._answer(call, asked))

    async def Complete(self, request: inference.CompleteRequest, context: _Context) -> inference.CompleteResponse:
        with self._calls.call("Complete", context) as call:
            asked = call.complete(complete_from_wire(request, self._most), request.request_id)
            return await _whole(inference.CompleteResponse, await self._answer(call, asked))

    async def StreamChat(
        self, request: inference.StreamChatRequest, context: _Context
    ) -> AsyncIterator[inference.StreamChatResponse]:
        with self._calls.call("StreamChat", context) as call:
            asked = call.complete(chat_from_wire(request.chat, self._most), request.chat.request_id)
            async with contextlib.aclosing(await self._stream(call, asked)) as events:
                chat = ChatEvents({})
                async for event in events:
                    if (wire := chat.written(event)) is not None:
                        yield inference.StreamChatResponse(event=wire)

    async def StreamComplete(
        self, request: inference.StreamCompleteRequest, context: _Context
    ) -> AsyncIterator[inference.StreamCompleteResponse]:
        with self._calls.call("StreamComplete", context) as call:
            asked = call.complete(complete_from_wire(request.complete, self._most), request.complete.request_id)
            async with contextlib.aclosing(await self._stream(call, asked)) as events:
                async for event in events:
                    yield inference.StreamCompleteResponse(event=event_to_wire(event))

    async def AttachGeneration(
        self, request: inference.AttachGenerationRequest, context: _Context
    ) -> AsyncIterator[inference.AttachGenerationResponse]:
        with self._calls.call("AttachGeneration", context) as call:
            from_index = dict(request.from_index)
            async with contextlib.aclosing(attached(self._core, request.generation_id, from_index, call.tenant)) as wires:
                async for wire in self._live.while_in(call.caller, wires):
                    yield inference.AttachGenerationResponse(event=wire)

    async def CancelGeneration(
        self, request: inference.CancelGenerationRequest, context: _Context
    ) -> inference.CancelGenerationResponse:
        with self._calls.call("CancelGeneration", context) as call:
            await self._core.cancel(request.generation_id, tenant=call.tenant)
            return inference.CancelGenerationResponse()

    async def ListModels(self, request: inference.ListModelsRequest, context: _Context) -> inference.ListModelsResponse:
        with self._calls.call("ListModels", context) as call:
            allowed = (model for model in self._core.models() if call.caller.may_use(model.name))
            return inference.ListModelsResponse(models=map(_model, allowed))

    async def CountTokens(self, request: inference.CountTokensRequest, context: _Context) -> inference.CountTokensResponse:
        with self._calls.call("CountTokens", context) as call:
            model = allowed_model(call.caller, name_from_wire(request.model, "model"))
            return inference.CountTokensResponse(tokens=await self._core.count_tokens(model, _prompt(request, self._most)))

    async def _answer(self, call: RpcCall, request: GenerationRequest) -> Answer:
        departing = Departing.of(request, call.on_disconnect, can_return=False)
        generation_id = await departing.submit(self._core)
        events = self._core.follow(generation_id, whole=True)
        if departing.cancels:
            events = ending_with_reader(self._core, generation_id, events)
        async with contextlib.aclosing(events):
            return await Answer.read(events)

    async def _stream(self, call: RpcCall, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Submits the request, and returns the events of its generation."""
        departing = Departing.of(request, call.on_disconnect, can_return=True)
        generation_id = await departing.submit(self._core)
        events = self._core.follow(generation_id)
        return ending_with_reader(self._core, generation_id, events) if departing.cancels else events


async def _whole(kind: type[_Response], answer: Answer) -> _Response:
    """Returns the answer as a response of this kind. A large one is made in a thread."""
    return await asyncio.to_thread(whole_response, kind, answer) if answer.is_large else whole_response(kind, answer)


def _prompt(request: inference.CountTokensRequest, most: MostParts) -> Prompt:
    if request.WhichOneof("prompt") == "messages":
        return ChatPrompt(messages_from_wire(request.messages.messages, most))
    if not request.text:
        raise errors.invalid("prompt", "messages or text must be given and must not be empty")
    return TextPrompt(request.text)


def _model(model: ServedModel) -> inference.Model:
    defaults = sampling_defaults_to_wire(model.sampling_defaults)
    return inference.Model(
        name=model.name,
        context_length=model.context_length,
        ready_nodes=model.ready_nodes,
        sampling_defaults=defaults,
        parent=model.parent,
    )
