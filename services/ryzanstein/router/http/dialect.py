"""How chat and completion answers are written: the two shapes that OpenAI gives to the same generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ryzanstein.generation import FinishReason, Token, Usage

# OpenAI writes this for a token that is all but impossible; JSON has no infinity.
_LOWEST_LOGPROB = -9999.0
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "cancelled"}


class Dialect(Protocol):
    """Writes choices, of a whole answer and of chunks of a stream. `offset` is where the text begins in its choice."""

    id_prefix: str
    object: str
    chunk_object: str

    def answer(self, choice: int, tokens: Sequence[Token], reason: FinishReason) -> dict[str, Any]: ...

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What a stream sends before a choice's first token, if anything."""
        ...

    def delta(self, choice: int, tokens: Sequence[Token], offset: int) -> dict[str, Any]: ...

    def ending(self, choice: int, reason: FinishReason) -> dict[str, Any]: ...


class ChatDialect:
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def answer(self, choice: int, tokens: Sequence[Token], reason: FinishReason) -> dict[str, Any]:
        return {
            "index": choice,
            "message": {"role": "assistant", "content": text_of(tokens), "refusal": None},
            "logprobs": _chat_logprobs(tokens),
            "finish_reason": _FINISH[reason],
        }

    def opening(self, choice: int) -> dict[str, Any] | None:
        return _chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        return {**_chunk(choice, {"content": text_of(tokens)}), "logprobs": _chat_logprobs(tokens)}

    def ending(self, choice: int, reason: FinishReason) -> dict[str, Any]:
        return {**_chunk(choice, {}), "finish_reason": _FINISH[reason]}


class CompletionDialect:
    """text_completion, the same for answers and chunks."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def answer(self, choice: int, tokens: Sequence[Token], reason: FinishReason) -> dict[str, Any]:
        return {**self.delta(choice, tokens, 0), "finish_reason": _FINISH[reason]}

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def delta(self, choice: int, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        return {
            "index": choice,
            "text": text_of(tokens),
            "logprobs": _completion_logprobs(tokens, offset),
            "finish_reason": None,
        }

    def ending(self, choice: int, reason: FinishReason) -> dict[str, Any]:
        return {**self.delta(choice, (), 0), "finish_reason": _FINISH[reason]}


def text_of(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def _chunk(choice: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any] | None:
    content = [
        {
            **_logprob(_own_text(token), token.logprobs.logprob),
            "top_logprobs": [_logprob(text, logprob) for _, text, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None} if content else None


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(text.encode("utf-8", "replace"))}


def _completion_logprobs(tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
    rows = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    if not rows:
        return None
    offsets = []
    for token, _ in rows:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_own_text(token) for token, _ in rows],
        "token_logprobs": [max(row.logprob, _LOWEST_LOGPROB) for _, row in rows],
        "top_logprobs": [{text: max(value, _LOWEST_LOGPROB) for _, text, value in row.top} for _, row in rows],
        "text_offset": offsets,
    }


def _own_text(token: Token) -> str:
    """The token's own string where it is among the likeliest; its share of the text can be less while characters are open."""
    if token.logprobs is not None:
        for token_id, text, _ in token.logprobs.top:
            if token_id == token.token_id:
                return text
    return token.text
