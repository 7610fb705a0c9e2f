"""A client over HTTP: chat completions as server-sent events, and Last-Event-ID for the rest.

The events carry no token ids and no node. They carry the next index of each choice and, with log
probabilities, one entry per token. That is enough to detect a lost or repeated token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.lab.clients.forms import AnswerForm, CallForm, ObjectForm
from ryzanstein.lab.clients.http_stream import HttpAnswer, HttpRequest, ServerSentEvent, send
from ryzanstein.lab.clients.reading import AnswerReading, CallPiece, Piece
from ryzanstein.lab.clients.transport import Request, RouterAddress

CODES = {
    400: Code.INVALID_ARGUMENT,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    429: Code.RESOURCE_EXHAUSTED,
    503: Code.UNAVAILABLE,
}
_ID_PREFIX = "chatcmpl-"
_DONE = "[DONE]"
# An event has no RetryInfo: these errors are retryable, and the client chooses when
# (docs/reference/errors.md).
_AGAIN = {"GENERATION_MOVED": 0.02, "NO_NODES": 1.0, "SESSION_BUSY": 1.0, "QUEUE_FULL": 1.0}


class HttpTransport:
    """One connection per stream. It needs questions that request log probabilities."""

    def __init__(self, routers: Sequence[RouterAddress]) -> None:
        self._routers = routers
        self._answer: HttpAnswer | None = None
        self._cursor = ""

    async def follow(self, request: Request, reading: AnswerReading, progress: Callable[[], None]) -> None:
        """See `Transport.follow`."""
        try:
            self._answer = await self._ask(request, reading)
            if self._answer.status != 200:
                raise _refusal(self._answer.status, self._answer.headers, await self._answer.body())
            reading.node_id = self._answer.headers.get("x-ryzanstein-node", "")
            async for event in self._answer.events():
                if event.data == _DONE:
                    return
                self._take(event, reading)
                progress()
        except (OSError, TimeoutError) as error:
            raise RyzansteinError(str(error), Code.UNAVAILABLE, Code.UNAVAILABLE.name) from None
        finally:
            if self._answer is not None:
                self._answer.close()
                self._answer = None
        raise RyzansteinError("the stream ended without [DONE]", Code.UNAVAILABLE, Code.UNAVAILABLE.name)

    async def leave(self) -> None:
        """See `Transport.leave`."""
        if self._answer is not None:
            self._answer.close()

    async def _ask(self, request: Request, reading: AnswerReading) -> HttpAnswer:
        router = self._routers[reading.router]
        tls = router.tls
        if reading.generation_id:
            path = f"/v1/generations/{_ID_PREFIX}{reading.generation_id}/events?include_usage=true"
            attach = HttpRequest("GET", path, {"last-event-id": self._cursor, **router.credential})
            return await send(router.http_host, router.http_port, attach, tls)
        self._cursor = ""
        headers = {"content-type": "application/json", **router.credential}
        body = json.dumps(chat_body(request)).encode()
        return await send(router.http_host, router.http_port, HttpRequest("POST", "/v1/chat/completions", headers, body), tls)

    def _take(self, event: ServerSentEvent, reading: AnswerReading) -> None:
        if event.name == "error":
            raise _stream_error(json.loads(event.data)["error"])
        chunk = json.loads(event.data)
        reading.generation_id = chunk["id"].removeprefix(_ID_PREFIX)
        self._cursor = event.event_id or self._cursor
        if chunk.get("usage"):
            reading.prompt_tokens = chunk["usage"]["prompt_tokens"]
            reading.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            take_choice(choice, next_index(event.event_id), reading)


def next_index(event_id: str) -> dict[int, int]:
    """Returns the next index of each choice, from an event's id such as `GENERATION:0:12,1:9.`."""
    positions = (position.rstrip(".").split(":")[-2:] for position in event_id.split(",") if position)
    return {int(choice): int(index) for choice, index in positions}


def take_choice(choice: Mapping[str, Any], positions: Mapping[int, int], reading: AnswerReading) -> None:
    rows = (choice.get("logprobs") or {}).get("content") or []
    number = choice["index"]
    text, calls = choice["delta"].get("content") or "", [_call(each) for each in choice["delta"].get("tool_calls") or ()]
    if rows or text or calls:
        first_index, tokens = positions[number] - len(rows), [row["token"] for row in rows]
        reading.take(Piece(number, first_index, tokens, text, [row["logprob"] for row in rows], calls=calls))
    if choice["finish_reason"]:
        reading.finished(number, f"FINISH_REASON_{choice['finish_reason'].upper()}")


def _call(piece: Mapping[str, Any]) -> CallPiece:
    function = piece["function"]
    return CallPiece(piece["index"], piece.get("id") or "", function.get("name") or "", function.get("arguments") or "")


def chat_body(request: Request) -> dict[str, Any]:
    sampling = dict(request.question.sampling)
    top = sampling.pop("logprobs")
    asked = {"logprobs": True, "top_logprobs": top, "stream": True, "stream_options": {"include_usage": True}}
    session = {"session_id": request.session_id} if request.session_id else {}
    model = {"model": request.question.model} if request.question.model else {}
    messages = [{"role": "user", "content": request.text}]
    return {"messages": messages, "user": request.user, **sampling, **asked, **session, **model, **_form(request.question.form)}


def _form(form: AnswerForm | None) -> dict[str, Any]:
    match form:
        case ObjectForm(schema):
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "asked", "schema": schema}}}
        case CallForm(functions, named):
            tools = [{"type": "function", "function": {"name": each, "parameters": functions[each]}} for each in functions]
            return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": named}} if named else "required"}
    return {}


def _refusal(status: int, headers: Mapping[str, str], body: str) -> RyzansteinError:
    """Returns a typed error of the API.

    One without a body of ours counts as a broken connection.
    """
    code = CODES.get(status, Code.INTERNAL)
    try:
        message = json.loads(body)["error"]
    except (ValueError, KeyError):
        return RyzansteinError(body[:256], code, code.name)
    after_ms = headers.get("retry-after-ms")
    reason = str(message.get("code") or code.name).upper()
    return RyzansteinError(message["message"], code, reason, retry_after_s=int(after_ms) / 1000 if after_ms else None)


def _stream_error(message: Mapping[str, Any]) -> RyzansteinError:
    reason = str(message.get("code") or "INTERNAL").upper()
    code = Code.UNAVAILABLE if reason in _AGAIN else Code.INTERNAL
    return RyzansteinError(str(message.get("message")), code, reason, retry_after_s=_AGAIN.get(reason))
