"""The suite's clients over HTTP: whole answers, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from tests.cluster.conformance.asked import Asked, Heard, Refusal, Reply

from ryzanstein.errors import Code

CODES = {
    400: Code.INVALID_ARGUMENT,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    422: Code.FAILED_PRECONDITION,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}
# OpenAI's names for reasons of ours.
_REASONS = {"context_length_exceeded": "CONTEXT_TOO_LONG"}


def refusal(status: int, error: Mapping[str, Any], retryable: bool) -> Refusal:
    code = str(error["code"])
    reason = _REASONS.get(code, code.upper())
    return Refusal(CODES[status], reason, error["param"] or "", error.get("metadata") or {}, retryable, error["message"])


def take_choice(message: Mapping[str, Any], heard: Heard) -> None:
    """Adds a choice of a chunk, or of a whole answer, in either of OpenAI's forms."""
    parts = message.get("delta") or message.get("message") or {}
    heard.text += parts.get("content") or message.get("text") or ""
    for number, call in enumerate(parts.get("tool_calls") or ()):
        function = call["function"]
        heard.add_call(call.get("index", number), function.get("name") or "", function["arguments"])
    logprobs = message.get("logprobs") or {}
    for row in logprobs.get("content") or []:
        heard.rows.append((row["token"], row["logprob"], tuple(top["token"] for top in row["top_logprobs"])))
    for token, value, top in zip(*(logprobs.get(key, ()) for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        heard.rows.append((token, value, tuple(top)))
    heard.reason = message["finish_reason"] or heard.reason


def take_usage(usage: Mapping[str, Any] | None, reply: Reply) -> None:
    if usage:
        reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]


class HttpDriver:
    """Whole answers."""

    streams = False

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def ask(self, asked: Asked) -> Reply:
        answer = self._http.post(asked.url, json=asked.body(), headers=_headers(asked))
        if answer.status_code != 200:
            raise refusal(answer.status_code, answer.json()["error"], "Retry-After" in answer.headers)
        body = answer.json()
        reply = Reply(bare(body["id"]))
        take_usage(body["usage"], reply)
        for message in body["choices"]:
            take_choice(message, reply.of(message["index"]))
        return reply

    def begin(self, asked: Asked, num_tokens: int) -> Reply:
        raise NotImplementedError

    def attach(self, reply: Reply) -> Reply:
        raise NotImplementedError

    def cancelled(self, asked: Asked, num_tokens: int) -> Reply:
        raise NotImplementedError


class SseDriver:
    """Server-sent events, and Last-Event-ID."""

    streams = True

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._ids: dict[str, tuple[str, str]] = {}

    def close(self) -> None:
        self._http.close()

    def ask(self, asked: Asked) -> Reply:
        with self._posted(asked) as answer:
            return self._read(answer, Reply())

    def begin(self, asked: Asked, num_tokens: int) -> Reply:
        with self._posted(asked) as answer:
            return self._read(answer, Reply(), num_tokens)

    def attach(self, reply: Reply) -> Reply:
        response_id, event_id = self._ids[reply.generation]
        path = f"/v1/generations/{response_id}/events?include_usage=true"
        with self._http.stream("GET", path, headers={"Last-Event-ID": event_id}) as answer:
            return self._read(answer, reply)

    def cancelled(self, asked: Asked, num_tokens: int) -> Reply:
        with self._posted(asked) as answer:
            events = _events(answer)
            reply = self._take(events, Reply(), num_tokens)
            response_id, _ = self._ids[reply.generation]
            self._http.delete(f"/v1/generations/{response_id}").raise_for_status()
            return self._take(events, reply)

    def _posted(self, asked: Asked) -> Any:
        body = asked.body(stream=True, stream_options={"include_usage": True})
        return self._http.stream("POST", asked.url, json=body, headers=_headers(asked))

    def _read(self, answer: httpx.Response, reply: Reply, until: int | None = None) -> Reply:
        if answer.status_code != 200:
            answer.read()
            raise refusal(answer.status_code, answer.json()["error"], "Retry-After" in answer.headers)
        return self._take(_events(answer), reply, until)

    def _take(self, events: Iterator[dict[str, str]], reply: Reply, until: int | None = None) -> Reply:
        for event in events:
            if event["data"] == "[DONE]":
                return reply
            chunk = json.loads(event["data"])
            if event.get("event") == "error":
                error = chunk["error"]
                raise refusal(_status_of(error), error, True)
            reply.generation = bare(chunk["id"])
            self._ids[reply.generation] = (chunk["id"], event["id"])
            take_usage(chunk.get("usage"), reply)
            for message in chunk["choices"]:
                heard = reply.of(message["index"])
                take_choice(message, heard)
                heard.next_index = _position(event["id"])[message["index"]]
            if until is not None and reply.num_read >= until:
                return reply
        raise AssertionError("the stream ended without [DONE]")


def bare(response_id: str) -> str:
    return response_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _headers(asked: Asked) -> dict[str, str]:
    return {**asked.headers, **({"X-Tenant-Id": asked.tenant} if asked.tenant else {})}


def _position(event_id: str) -> dict[int, int]:
    """The next index of each choice, from the last parts of an id: `choice:index`, with a dot where it has ended."""
    pairs = (pair.rstrip(".").split(":")[-2:] for pair in event_id.split(","))
    return {int(choice): int(index) for choice, index in pairs}


def _events(answer: httpx.Response) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        elif event:
            yield event
            event = {}


def _status_of(error: Mapping[str, Any]) -> int:
    return 504 if "deadline" in str(error["code"]) else 503
