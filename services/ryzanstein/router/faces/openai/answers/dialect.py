"""Formats chat and completion answers: OpenAI's two shapes for the same generation.

How an answer is shown need not be said again by a reader that comes back. It travels with the request
as an opaque text, also to other routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from ryzanstein.generation.prompts import Message
from ryzanstein.generation.tokens import FinishReason, PromptToken, TopLogprob, Usage
from ryzanstein.replies.parts import CallDelta
from ryzanstein.replies.reader import NOTHING, ReplyDelta
from ryzanstein.router.faces.openai.answers.alignment import LogprobRow
from ryzanstein.router.faces.openai.requests.schemas import GenerationOptions

# OpenAI uses this for a token that is almost impossible; JSON has no infinity.
_LOWEST_LOGPROB = -9999.0
_FINISH = {
    FinishReason.UNSPECIFIED: "stop",  # the node ended it for a reason unknown to OpenAI's clients
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.TOOL_CALLS: "tool_calls",
}


class AnswerDialect(Protocol):
    """Formats the choices of whole answers and of stream chunks.

    `rows` are the log probabilities. Of a whole answer None: the client requested none; empty: it did,
    and no token is in the text.
    """

    kind: str
    id_prefix: str
    object: str
    chunk_object: str

    def answer(self, choice: int, message: Message, rows: Sequence[LogprobRow] | None, reason: FinishReason) -> dict[str, Any]:
        """Returns a choice of a whole answer, for `written`: what is long in it is an iterator."""
        ...

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Returns what a stream sends before a choice's first token, if anything."""
        ...

    def delta(self, choice: int, reply: ReplyDelta, rows: Sequence[LogprobRow]) -> dict[str, Any]: ...

    def ending(
        self, choice: int, reason: FinishReason, rows: Sequence[LogprobRow], reply: ReplyDelta = NOTHING
    ) -> dict[str, Any]:
        """Returns the last chunk of a choice. `rows` are those that a stop string cut."""
        ...


class ChatDialect:
    """The chat format: chat.completion and chat.completion.chunk."""

    kind = "chat"
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def answer(self, choice: int, message: Message, rows: Sequence[LogprobRow] | None, reason: FinishReason) -> dict[str, Any]:
        return {
            "index": choice,
            "message": _message(message),
            "logprobs": None if rows is None else {"content": _chat_rows(rows), "refusal": None},
            "finish_reason": _FINISH[reason],
        }

    def opening(self, choice: int) -> dict[str, Any] | None:
        return _chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, reply: ReplyDelta, rows: Sequence[LogprobRow]) -> dict[str, Any]:
        return {**_chunk(choice, _delta(reply) or {"content": ""}), "logprobs": _chat_logprobs(rows)}

    def ending(
        self, choice: int, reason: FinishReason, rows: Sequence[LogprobRow], reply: ReplyDelta = NOTHING
    ) -> dict[str, Any]:
        return {**_chunk(choice, _delta(reply)), "logprobs": _chat_logprobs(rows), "finish_reason": _FINISH[reason]}


class CompletionDialect:
    """The completion format: text_completion, for answers and chunks."""

    kind = "completion"
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def answer(self, choice: int, message: Message, rows: Sequence[LogprobRow] | None, reason: FinishReason) -> dict[str, Any]:
        logprobs = None if rows is None else _completion_rows(rows)
        return {**self.delta(choice, ReplyDelta(message.content), ()), "logprobs": logprobs, "finish_reason": _FINISH[reason]}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def delta(self, choice: int, reply: ReplyDelta, rows: Sequence[LogprobRow]) -> dict[str, Any]:
        return {
            "index": choice,
            "text": reply.content,
            "logprobs": _completion_logprobs(rows),
            "finish_reason": None,
        }

    def ending(
        self, choice: int, reason: FinishReason, rows: Sequence[LogprobRow], reply: ReplyDelta = NOTHING
    ) -> dict[str, Any]:
        return {**self.delta(choice, reply, rows), "finish_reason": _FINISH[reason]}


def echoed_logprobs(prompt: Sequence[PromptToken], num_chars: int, rows: Sequence[LogprobRow]) -> dict[str, Any]:
    """Returns the log probabilities of a prompt's tokens and of the answer that follows its `num_chars` characters."""
    ends = list(accumulate((len(token.text) for token in prompt), initial=0))
    answer = _completion_rows(rows)
    of_prompt: dict[str, list[Any]] = {
        "tokens": [token.text for token in prompt],
        "token_logprobs": [None if token.logprob is None else max(token.logprob, _LOWEST_LOGPROB) for token in prompt],
        "top_logprobs": [None if token.logprob is None else _tops(token.top) for token in prompt],
        "text_offset": ends[:-1],
    }
    answer["text_offset"] = [num_chars + offset for offset in answer["text_offset"]]
    return {name: of_prompt[name] + answer[name] for name in of_prompt}


def prompt_logprobs_body(prompt: Sequence[PromptToken]) -> Iterator[dict[str, Any] | None]:
    """Yields a prompt's log probabilities as vLLM shows them, by token id. The first token has none."""
    return (None if token.logprob is None else _ranked(token) for token in prompt)


def _ranked(token: PromptToken) -> dict[str, Any]:
    own = {"logprob": max(token.logprob or 0.0, _LOWEST_LOGPROB), "rank": None, "decoded_token": token.text}
    return {str(token.token_id): own} | {
        str(top.token_id): {"logprob": max(top.logprob, _LOWEST_LOGPROB), "rank": rank, "decoded_token": top.text}
        for rank, top in enumerate(token.top, 1)
    }


def _tops(tops: Sequence[TopLogprob]) -> dict[str, float]:
    return {top.text: max(top.logprob, _LOWEST_LOGPROB) for top in tops}


def omitted_body(num_tokens: int) -> dict[str, Any]:
    """Returns what an answer says of prompt tokens that were left out; nothing if none were."""
    return {"omitted_tokens": num_tokens} if num_tokens else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens} | omitted_body(usage.omitted_prompt_tokens),
    }


def _message(message: Message) -> dict[str, Any]:
    """Returns the answer as a message. Fields that only some answers have are absent from the others."""
    body: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["content"] = message.content or None
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _delta(reply: ReplyDelta) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if reply.content:
        delta["content"] = reply.content
    if reply.reasoning:
        delta["reasoning_content"] = reply.reasoning
    if reply.calls:
        delta["tool_calls"] = [_call(call) for call in reply.calls]
    return delta


def _call(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _chunk(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def _chat_logprobs(rows: Sequence[LogprobRow]) -> dict[str, Any] | None:
    return {"content": list(_chat_rows(rows)), "refusal": None} if rows else None


def _chat_rows(rows: Sequence[LogprobRow]) -> Iterator[dict[str, Any]]:
    for row in rows:
        top = [_logprob(top.text, top.logprob, top.token_bytes) for top in row.logprobs.top]
        yield {**_logprob(row.text, row.logprobs.logprob, row.kept), "top_logprobs": top}


def _logprob(text: str, logprob: float, token_bytes: bytes | None) -> dict[str, Any]:
    of_token = text.encode("utf-8", "replace") if token_bytes is None else token_bytes
    return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(of_token)}


def _completion_logprobs(rows: Sequence[LogprobRow]) -> dict[str, Any] | None:
    return _completion_rows(rows) if rows else None


def _completion_rows(rows: Sequence[LogprobRow]) -> dict[str, Any]:
    return {
        "tokens": [row.text for row in rows],
        "token_logprobs": [max(row.logprobs.logprob, _LOWEST_LOGPROB) for row in rows],
        "top_logprobs": [_tops(row.logprobs.top) for row in rows],
        "text_offset": [row.offset for row in rows],
    }


_USAGE, _CONTINUOUS = "usage", "continuous"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer. `usage`: a stream ends with it; `continuous`: each chunk has it."""

    dialect: AnswerDialect
    usage: bool = False
    continuous: bool = False

    @classmethod
    def read(cls, text: str, response_id: str) -> AnswerForm:
        """Returns what `written` wrote. What is unknown, and of another version, is left out.

        `response_id` tells the form of a generation whose text says nothing.
        """
        kind, *flags = text.split(",")
        if not kind:
            kind = CompletionDialect.kind if response_id.startswith(CompletionDialect.id_prefix) else ""
        dialect: AnswerDialect = CompletionDialect() if kind == CompletionDialect.kind else ChatDialect()
        return cls(dialect, _USAGE in flags, _CONTINUOUS in flags)

    @property
    def written(self) -> str:
        flags = [name for name, is_set in ((_USAGE, self.usage), (_CONTINUOUS, self.continuous)) if is_set]
        return ",".join((self.dialect.kind, *flags))


def form_for(body: GenerationOptions, dialect: AnswerDialect) -> AnswerForm:
    """Returns the form that a request asks for."""
    options = body.stream_options
    if options is None:
        return AnswerForm(dialect)
    return AnswerForm(dialect, bool(options.include_usage), bool(options.continuous_usage_stats))
