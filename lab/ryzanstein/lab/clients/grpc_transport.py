"""A client over gRPC: StreamChat, and AttachGeneration for what is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence

import grpc

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.clients.forms import CallForm, ObjectForm
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading, CallPiece, Piece
from ryzanstein.lab.clients.transport import Request, RouterAddress
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.survey.reach import RouterTrust
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

_Call = (
    grpc.aio.UnaryStreamCall[pb.StreamChatRequest, pb.StreamChatResponse]
    | grpc.aio.UnaryStreamCall[pb.AttachGenerationRequest, pb.AttachGenerationResponse]
)


class GrpcTransport:
    """A client's channel.

    A broken stream closes it, so that the next one starts without its back-off.
    """

    def __init__(self, routers: Sequence[RouterAddress]) -> None:
        self._routers = routers
        self._channel: grpc.aio.Channel | None = None
        self._router = -1
        self._left = False

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """See `Transport.follow`."""
        self._left = False
        stub = inference_pb2_grpc.InferenceServiceStub(await self._open(reading.router))
        try:
            async for response in self._call(stub, request, reading):
                _take(response.event, reading)
                progress()
        except grpc.aio.AioRpcError as failure:
            await self._close()
            raise error_from_rpc(failure) from None
        except asyncio.CancelledError:
            # A call that we cancelled ourselves looks like the cancellation of this task.
            if not self._left:
                raise
            raise RyzansteinError("the client disconnected", Code.CANCELLED, Code.CANCELLED.name) from None

    async def leave(self) -> None:
        """See `Transport.leave`."""
        self._left = True
        await self._close()

    async def _open(self, router: int) -> grpc.aio.Channel:
        if router != self._router:
            await self._close()
        if self._channel is None:
            self._channel = _open(self._routers[router])
            self._router = router
        return self._channel

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _call(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: Request, reading: AnswerReading) -> _Call:
        metadata, limit_s = tuple(self._routers[reading.router].credential.items()), request.question.call_s
        if not reading.generation_id:
            chat = pb.StreamChatRequest(chat=_chat(request.question, request))
            return stub.StreamChat(chat, timeout=limit_s, metadata=metadata)
        attach = pb.AttachGenerationRequest(generation_id=reading.generation_id, from_index=reading.next_index)
        return stub.AttachGeneration(attach, timeout=limit_s, metadata=metadata)


def _open(router: RouterAddress) -> grpc.aio.Channel:
    if not router.roots:
        return open_channel(router.grpc, retries=False)
    return RouterTrust(router.roots).open(router.grpc, None)


def _chat(question: LoadQuestion, request: Request) -> pb.ChatRequest:
    chat = pb.ChatRequest(
        messages=[pb.Message(role=pb.ROLE_USER, content=request.text)],
        sampling=pb.SamplingParams(**question.sampling),
        session_id=request.session_id,
        user=request.user,
        model=question.model,
    )
    match question.form:
        case ObjectForm(schema):
            chat.sampling.constraint.json_schema = json.dumps(schema)
        case CallForm(functions, named):
            chat.tools.extend(pb.Tool(name=name, parameters=json.dumps(schema)) for name, schema in functions.items())
            chat.tool_choice.mode = pb.TOOL_MODE_FUNCTION if named else pb.TOOL_MODE_REQUIRED
            chat.tool_choice.name = named
    return chat


def _take(event: pb.GenerationEvent, reading: AnswerReading) -> None:
    match event.WhichOneof("kind"):
        case "started":
            reading.generation_id = event.started.generation_id
            reading.node_id = reading.node_id or event.started.node_id
            reading.prompt_tokens = event.started.prompt_tokens
        case "delta":
            delta = event.delta
            logprobs = [entry.logprob for entry in delta.logprobs]
            tokens = list(delta.token_ids)
            calls = _calls(delta.tool_calls)
            reading.take(Piece(delta.choice, delta.first_index, tokens, delta.text, logprobs, delta.node_id, calls))
        case "finished":
            last, calls = event.finished, _calls(event.finished.tool_calls)
            reading.take(Piece(last.choice, reading.next_index.get(last.choice, 0), [], last.text, calls=calls))
            reading.finished(last.choice, pb.FinishReason.Name(last.finish_reason))
            # The last one has the complete count, whichever choice that is.
            reading.completion_tokens = event.finished.usage.completion_tokens


def _calls(pieces: Iterable[pb.ToolCallDelta]) -> list[CallPiece]:
    return [CallPiece(piece.index, piece.id, piece.name, piece.arguments) for piece in pieces]
