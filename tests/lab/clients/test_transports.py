"""The transports against scripted routers on real sockets: what a router loses or repeats is seen, what breaks is told."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.typing import Subprotocol

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.chaos.questions import FORM_QUESTIONS, QUESTIONS
from ryzanstein.lab.clients.client import LoadClient
from ryzanstein.lab.clients.forms import CallForm, ObjectForm
from ryzanstein.lab.clients.grpc_transport import GrpcTransport
from ryzanstein.lab.clients.http_transport import HttpTransport, chat_body, next_index
from ryzanstein.lab.clients.judge import judge
from ryzanstein.lab.clients.reading import AnswerReading, CallRead
from ryzanstein.lab.clients.socket_transport import SocketTransport
from ryzanstein.lab.clients.transport import Request, RouterAddress, Transport
from ryzanstein.rpc.status import abort
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

NUM_TOKENS = 10
REQUEST = Request(QUESTIONS[0], 0, "", "user")


class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Streams tokens 0, 1, 2, ... one by one over gRPC, but for what it was told to lose, to repeat and where to break."""

    def __init__(self, lose: int = -1, repeat: int = -1, break_at: int = -1, refuse: RyzansteinError | None = None) -> None:
        self._lose, self._repeat, self._break_at, self._refuse = lose, repeat, break_at, refuse
        self.attached_at: list[int] = []

    async def StreamChat(self, request: pb.StreamChatRequest, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
        if self._refuse is not None:
            await abort(context, self._refuse)
        for event in self._events(0):
            if event.delta.first_index == self._break_at and event.HasField("delta"):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            yield pb.StreamChatResponse(event=event)

    async def AttachGeneration(
        self, request: pb.AttachGenerationRequest, context: Any
    ) -> AsyncIterator[pb.AttachGenerationResponse]:
        self.attached_at.append(request.from_index[0])
        for event in self._events(request.from_index[0]):
            yield pb.AttachGenerationResponse(event=event)

    def _events(self, first: int) -> list[pb.GenerationEvent]:
        events = [pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", node_id="node-0", prompt_tokens=5))]
        indices = [i for i in range(first, NUM_TOKENS) for _ in range(2 if i == self._repeat else 1) if i != self._lose]
        for index in indices:
            logprobs = [pb.TokenLogprobs(logprob=-0.1 * index)]
            delta = pb.GenerationDelta(
                first_index=index, token_ids=[100 + index], text=f"{index} ", logprobs=logprobs, node_id="node-0"
            )
            events.append(pb.GenerationEvent(delta=delta))
        usage = pb.Usage(prompt_tokens=5, completion_tokens=NUM_TOKENS)
        finished = pb.GenerationFinished(finish_reason=pb.FINISH_REASON_STOP, usage=usage)
        return [*events, pb.GenerationEvent(finished=finished)]


async def read(transport: Transport, request: Request = REQUEST) -> AnswerReading:
    reading = AnswerReading("greedy")
    client = LoadClient(transport, 1, random.Random(0))
    try:
        await client.read(request, reading, lambda: None)
    finally:
        await client.close()
    return reading


async def read_grpc(router: inference_pb2_grpc.InferenceServiceServicer, request: Request = REQUEST) -> AnswerReading:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await read(GrpcTransport([RouterAddress(f"127.0.0.1:{port}", "127.0.0.1", 0)]), request)
    finally:
        await server.stop(None)


async def test_over_grpc_an_honest_answer_is_flawless() -> None:
    reading = await read_grpc(ScriptedRouter())
    assert judge(reading, reading).flawless
    assert reading.choices[0].tokens == [100 + i for i in range(NUM_TOKENS)]
    assert (reading.prompt_tokens, reading.completion_tokens, reading.node_id) == (5, NUM_TOKENS, "node-0")


@pytest.mark.parametrize(
    ("router", "lost", "repeated"),
    [(ScriptedRouter(lose=4), 1, 0), (ScriptedRouter(lose=NUM_TOKENS - 1), 1, 0), (ScriptedRouter(repeat=4), 0, 1)],
    ids=["lost in the middle", "lost at the end", "repeated"],
)
async def test_over_grpc_what_a_router_loses_or_repeats_is_seen(router: ScriptedRouter, lost: int, repeated: int) -> None:
    verdict = judge(await read_grpc(ScriptedRouter()), await read_grpc(router))
    assert (verdict.lost, verdict.repeated) == (lost, repeated)


async def test_over_grpc_a_form_is_requested_and_calls_are_read_to_the_end() -> None:
    class Calling(inference_pb2_grpc.InferenceServiceServicer):
        async def StreamChat(self, request: pb.StreamChatRequest, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
            self.asked = request.chat
            first, rest = pb.ToolCallDelta(id="i", name="f", arguments='{"a"'), pb.ToolCallDelta(arguments=": 1}")
            yield pb.StreamChatResponse(event=pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g")))
            yield pb.StreamChatResponse(event=pb.GenerationEvent(delta=pb.GenerationDelta(token_ids=[1], tool_calls=[first])))
            ended = pb.GenerationFinished(finish_reason=pb.FINISH_REASON_TOOL_CALLS, tool_calls=[rest])
            yield pb.StreamChatResponse(event=pb.GenerationEvent(finished=ended))

    router = Calling()
    reading = await read_grpc(router, ASKED_TO_CALL)
    assert reading.choices[0].calls == {0: CallRead("i", "f", '{"a": 1}')}
    assert [tool.name for tool in router.asked.tools] == ["store", "note"]
    assert router.asked.tool_choice.mode == pb.TOOL_MODE_REQUIRED


async def test_over_grpc_a_broken_stream_is_attached_to_where_it_broke() -> None:
    router = ScriptedRouter(break_at=6)
    reading = await read_grpc(router)
    assert router.attached_at == [6]
    assert reading.troubles == ["UNAVAILABLE"]
    assert judge(await read_grpc(ScriptedRouter()), reading).flawless


async def test_over_grpc_a_typed_refusal_keeps_its_reason() -> None:
    reading = await read_grpc(ScriptedRouter(refuse=errors.invalid("n", "at most 16")))
    assert reading.failure.startswith("INVALID_ARGUMENT INVALID_ARGUMENT: n:")


def event(index: int, tokens: Sequence[int], **choice: Any) -> bytes:
    rows = [{"token": f"{token} ", "logprob": -0.1 * token, "bytes": [], "top_logprobs": []} for token in tokens]
    delta = {"content": "".join(row["token"] for row in rows)}  # type: ignore[misc]
    fields = {"index": 0, "delta": delta, "logprobs": {"content": rows}, "finish_reason": None, **choice}
    return f"id: 0:{index}\ndata: {json.dumps({'id': 'chatcmpl-g', 'choices': [fields]})}\n\n".encode()


FINISH = event(3, [], delta={}, logprobs=None, finish_reason="stop")
USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
END = f"data: {json.dumps({'id': 'chatcmpl-g', 'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n".encode()
HONEST = [event(1, [0]), event(3, [1, 2]), FINISH, END]


class HttpScript:
    """Answers each request with the next script: a status, headers and chunks; without an end, the connection breaks."""

    def __init__(self, *answers: tuple[int, dict[str, str], list[bytes]]) -> None:
        self._answers = list(answers)
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        status, headers, chunks = self._answers.pop(0)
        lines = [f"HTTP/1.1 {status} whatever", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        for chunk in chunks:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" if "transfer-encoding" in headers else chunk)
            await writer.drain()
        if chunks and chunks[-1] == END:
            writer.write(b"0\r\n\r\n")
        writer.close()


STREAM = {"transfer-encoding": "chunked", "x-ryzanstein-node": "node-2"}


async def read_http(*answers: tuple[int, dict[str, str], list[bytes]]) -> tuple[AnswerReading, HttpScript]:
    script = HttpScript(*answers)
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        address = RouterAddress("", "127.0.0.1", server.sockets[0].getsockname()[1])
        return await read(HttpTransport([address])), script


async def test_over_http_an_honest_answer_is_flawless() -> None:
    reading, script = await read_http((200, STREAM, HONEST))
    assert judge(reading, reading).flawless
    assert reading.choices[0].tokens == ["0 ", "1 ", "2 "]
    assert (reading.prompt_tokens, reading.completion_tokens, reading.node_id) == (5, 3, "node-2")
    assert script.heads[0].startswith("POST /v1/chat/completions HTTP/1.1\r\n")


async def test_over_http_what_a_router_loses_or_repeats_is_seen() -> None:
    honest, _ = await read_http((200, STREAM, HONEST))
    lost, _ = await read_http((200, STREAM, [event(1, [0]), event(3, [2]), FINISH, END]))
    repeated, _ = await read_http((200, STREAM, [event(2, [0, 1]), event(3, [1, 2]), FINISH, END]))
    assert judge(honest, lost).lost == 1
    assert judge(honest, repeated).repeated == 1


async def test_over_http_a_broken_stream_goes_on_with_its_last_event_id() -> None:
    honest, _ = await read_http((200, STREAM, HONEST))
    reading, script = await read_http((200, STREAM, HONEST[:1]), (200, STREAM, HONEST[1:]))
    assert judge(honest, reading).flawless
    assert reading.troubles == ["UNAVAILABLE"]
    assert script.heads[1].startswith("GET /v1/generations/chatcmpl-g/events?include_usage=true HTTP/1.1\r\n")
    assert "last-event-id: 0:1\r\n" in script.heads[1]


async def test_over_http_refusals_and_error_events_are_typed() -> None:
    body = json.dumps({"error": {"message": "n: at most 16", "code": "invalid_argument"}}).encode()
    refused, _ = await read_http((400, {"content-length": str(len(body))}, [body]))
    assert refused.failure == "INVALID_ARGUMENT INVALID_ARGUMENT: n: at most 16"
    broke = b'event: error\ndata: {"error": {"message": "in vain", "code": "attempts_exhausted"}}\n\n'
    ended, _ = await read_http((200, STREAM, [event(1, [0]), broke]))
    assert ended.failure == "INTERNAL ATTEMPTS_EXHAUSTED: in vain"


def test_positions_are_read_from_an_event_id() -> None:
    assert next_index("0:12,1:9.") == {0: 12, 1: 9}
    assert next_index("f00:0:12,1:9.") == {0: 12, 1: 9}
    assert next_index("") == {}


CALL = {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]}
BODY = {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}
ASKED_TO_CALL = Request(next(each for each in FORM_QUESTIONS if each.kind == "call-sse"), 0, "", "user")


async def test_over_http_calls_are_read_in_pieces() -> None:
    last = event(3, [], delta={}, logprobs=None, finish_reason="tool_calls")
    reading, _ = await read_http((200, STREAM, [event(1, [0], delta=CALL), event(3, [1, 2], delta=BODY), last, END]))
    assert reading.choices[0].calls == {0: CallRead("call_1", "f", '{"a": 1}')}
    assert (reading.choices[0].reason, reading.num_lost) == ("FINISH_REASON_TOOL_CALLS", 0)


def test_over_http_a_form_is_requested_as_openai_spells_it() -> None:
    body = chat_body(ASKED_TO_CALL)
    assert body["tool_choice"] == "required"
    assert [tool["function"]["name"] for tool in body["tools"]] == ["store", "note"]
    named = chat_body(replace(ASKED_TO_CALL, question=replace(ASKED_TO_CALL.question, form=CallForm({"f": {}}, "f"))))
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    formed = chat_body(replace(ASKED_TO_CALL, question=replace(ASKED_TO_CALL.question, form=ObjectForm({"type": "null"}))))
    assert formed["response_format"]["json_schema"]["schema"] == {"type": "null"}


class SocketScript:
    """Answers each request on a socket with the next script: frames for its stream; without an end, the socket breaks."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.credit = 0

    async def serve(self, socket: ServerConnection) -> None:
        async for text in socket:
            message = json.loads(text)
            if message["type"] == "credit":
                self.credit += message["chunks"]
                continue
            self.asked.append(message)
            answer = self._answers.pop(0)
            for frame in answer:
                await socket.send(json.dumps({**frame, "id": message["id"]}))
            if answer[-1]["type"] not in ("done", "error"):
                socket.transport.close()


def wording(index: int, tokens: Sequence[int], **choice: Any) -> dict[str, Any]:
    rows = [{"token": f"{token} ", "logprob": -0.1 * token, "bytes": [], "top_logprobs": []} for token in tokens]
    delta = {"content": "".join(row["token"] for row in rows)}  # type: ignore[misc]
    fields = {"index": 0, "delta": delta, "logprobs": {"content": rows}, "finish_reason": None, **choice}
    ended = fields["finish_reason"] is not None
    return {"type": "chunk", "choice": 0, "index": index, "ended": ended, "chunk": {"id": "chatcmpl-g", "choices": [fields]}}


BEGIN = [
    {"type": "accepted", "generation": "chatcmpl-g", "request_id": "r"},
    {"type": "started", "generation": "chatcmpl-g", "model": "m", "node": "node-2"},
]
FINISHED = wording(3, [], delta={}, logprobs=None, finish_reason="stop")
COUNTED = {"type": "chunk", "choice": None, "index": None, "ended": False, "chunk": {"choices": [], "usage": USAGE}}
DONE = {"type": "done", "generation": "chatcmpl-g"}


async def read_socket(*answers: list[dict[str, Any]]) -> tuple[AnswerReading, SocketScript]:
    script = SocketScript(*answers)
    async with serve(script.serve, "127.0.0.1", 0, subprotocols=[Subprotocol("ryzanstein.v1")]) as server:
        address = RouterAddress("", "127.0.0.1", next(iter(server.sockets)).getsockname()[1])
        return await read(SocketTransport([address])), script


HONEST_SOCKET = [*BEGIN, wording(1, [0]), wording(3, [1, 2]), FINISHED, COUNTED, DONE]


async def test_over_a_socket_an_honest_answer_is_flawless() -> None:
    reading, script = await read_socket(HONEST_SOCKET)
    assert judge(reading, reading).flawless
    assert reading.choices[0].tokens == ["0 ", "1 ", "2 "]
    assert (reading.prompt_tokens, reading.completion_tokens, reading.node_id) == (5, 3, "node-2")
    assert (script.asked[0]["type"], script.asked[0]["url"]) == ("submit", "/v1/chat/completions")


async def test_over_a_socket_what_a_router_loses_or_repeats_is_seen() -> None:
    honest, _ = await read_socket(HONEST_SOCKET)
    lost, _ = await read_socket([*BEGIN, wording(1, [0]), wording(3, [2]), FINISHED, COUNTED, DONE])
    repeated, _ = await read_socket([*BEGIN, wording(2, [0, 1]), wording(3, [1, 2]), FINISHED, COUNTED, DONE])
    assert judge(honest, lost).lost == 1
    assert judge(honest, repeated).repeated == 1


async def test_over_a_socket_that_breaks_the_client_attaches_where_it_stands() -> None:
    honest, _ = await read_socket(HONEST_SOCKET)
    reading, script = await read_socket(HONEST_SOCKET[:3], [BEGIN[1], *HONEST_SOCKET[3:]])
    assert judge(honest, reading).flawless
    assert reading.troubles == ["UNAVAILABLE"]
    attached = script.asked[1]
    assert (attached["type"], attached["generation"], attached["from_index"]) == ("attach", "chatcmpl-g", {"0": 1})


async def test_over_a_socket_calls_are_read_in_pieces() -> None:
    last = wording(3, [], delta={}, logprobs=None, finish_reason="tool_calls")
    reading, _ = await read_socket([*BEGIN, wording(1, [0], delta=CALL), wording(3, [1, 2], delta=BODY), last, COUNTED, DONE])
    assert reading.choices[0].calls == {0: CallRead("call_1", "f", '{"a": 1}')}


async def test_over_a_socket_errors_are_typed() -> None:
    error = {"message": "n: at most 16", "code": "invalid_argument"}
    refused, _ = await read_socket([{"type": "error", "status": 400, "error": error}])
    assert refused.failure == "INVALID_ARGUMENT INVALID_ARGUMENT: n: at most 16"
