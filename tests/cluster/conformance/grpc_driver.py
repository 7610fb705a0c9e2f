"""The suite's client over gRPC: StreamChat, StreamComplete and AttachGeneration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc
from tests.cluster.conformance.asked import Asked, Heard, Refusal, Reply

from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

_NAMES = {"request_id": "Idempotency-Key", "constraint.json_schema": "response_format"}
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class GrpcDriver:
    streams = True

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
        self._stub = InferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ask(self, asked: Asked) -> Reply:
        return self._read(self._begun(asked), Reply())

    def begin(self, asked: Asked, num_tokens: int) -> Reply:
        stream = self._begun(asked)
        reply = self._read(stream, Reply(), num_tokens)
        stream.cancel()
        return reply

    def attach(self, reply: Reply) -> Reply:
        seen = {choice: heard.next_index for choice, heard in reply.choices.items()}
        request = pb.AttachGenerationRequest(generation_id=reply.generation, from_index=seen)
        return self._read(self._stub.AttachGeneration(request, timeout=60), reply)

    def cancelled(self, asked: Asked, num_tokens: int) -> Reply:
        stream = self._begun(asked)
        reply = self._read(stream, Reply(), num_tokens)
        self._stub.CancelGeneration(pb.CancelGenerationRequest(generation_id=reply.generation), timeout=10)
        return self._read(stream, reply)

    def _begun(self, asked: Asked) -> Any:
        given = {"x-tenant-id": asked.tenant, "x-cancel-on-disconnect": "true" if asked.cancel_on_disconnect else ""}
        metadata = tuple((name, value) for name, value in given.items() if value)
        timeout = 60 if asked.timeout_ms is None else asked.timeout_ms / 1000
        constraint = pb.Constraint(json_schema=json.dumps(asked.schema)) if asked.schema is not None else None
        shared: dict[str, Any] = {
            "sampling": pb.SamplingParams(**asked.sampling, constraint=constraint),
            "model": asked.model,
            "user": asked.user,
        }
        shared["request_id"] = asked.key
        if asked.prompt is None:
            if asked.tool is not None:
                parameters = json.dumps(asked.tool["parameters"])
                shared["tools"] = [pb.Tool(name=asked.tool["name"], parameters=parameters)]
                shared["tool_choice"] = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
            messages = [pb.Message(role=pb.ROLE_USER, content=asked.text)] if asked.text else []
            chat = pb.ChatRequest(messages=messages, session_id=asked.session_id, **shared)
            return self._stub.StreamChat(pb.StreamChatRequest(chat=chat), timeout=timeout, metadata=metadata)
        ids = not isinstance(asked.prompt, str)
        prompt = {"token_ids": pb.TokenIds(ids=asked.prompt)} if ids else {"text": asked.prompt}
        complete = pb.CompleteRequest(**prompt, **shared)
        return self._stub.StreamComplete(pb.StreamCompleteRequest(complete=complete), timeout=timeout, metadata=metadata)

    def _read(self, stream: Any, reply: Reply, until: int | None = None) -> Reply:
        try:
            for response in stream:
                _take(response.event, reply)
                if until is not None and reply.num_read >= until:
                    break
        except grpc.RpcError as failure:
            raise _refusal(failure) from None
        return reply


def _take(event: pb.GenerationEvent, reply: Reply) -> None:
    match event.WhichOneof("kind"):
        case "started":
            reply.generation = event.started.generation_id
            reply.prompt_tokens = event.started.prompt_tokens
        case "delta":
            heard = reply.of(event.delta.choice)
            assert event.delta.first_index == heard.next_index, "a token was lost or repeated"
            heard.next_index += len(event.delta.token_ids)
            heard.text += event.delta.text
            _take_calls(event.delta.tool_calls, heard)
            heard.rows += [(row.text, row.logprob, tuple(top.text for top in row.top)) for row in event.delta.logprobs]
        case "finished":
            heard = reply.of(event.finished.choice)
            heard.reason = _REASONS[event.finished.finish_reason]
            heard.text += event.finished.text
            _take_calls(event.finished.tool_calls, heard)
            reply.completion_tokens = event.finished.usage.completion_tokens


def _take_calls(pieces: Iterable[pb.ToolCallDelta], heard: Heard) -> None:
    for piece in pieces:
        heard.add_call(piece.index, piece.name, piece.arguments)


def _refusal(failure: grpc.RpcError) -> Refusal:
    error = error_from_rpc(failure)
    field = error.violations[0].field.removeprefix("sampling.") if error.violations else _missing(error)
    field = _NAMES.get(field, field)
    return Refusal(error.code, error.reason, field, error.metadata, error.retry_after_s is not None, error.message)


def _missing(error: RyzansteinError) -> str:
    return "model" if error.resource is not None and error.resource[0] == "model" else ""
