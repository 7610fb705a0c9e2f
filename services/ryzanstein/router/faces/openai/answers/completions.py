"""Answers a completion request: one generation for each prompt, shown as one answer.

Prompts are generated at the same time and may run on different nodes. When one fails, the request
fails, and the others are cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ryzanstein.generation.prompts import Message, Prompt, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.tokens import Token, Usage
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.answer import Answer
from ryzanstein.router.faces.openai.answers.alignment import aligned
from ryzanstein.router.faces.openai.answers.dialect import CompletionDialect, echoed_logprobs, prompt_logprobs_body, usage_body
from ryzanstein.router.faces.openai.answers.writing import OneByOne, written
from ryzanstein.router.faces.openai.requests.prompts import Completions

_DIALECT = CompletionDialect()


async def echoed_texts(core: Core, asked: Completions) -> list[str]:
    """Returns what each answer begins with: its prompt, or nothing."""
    if not asked.echo:
        return [""] * len(asked.requests)
    return [await _text(core, request.model, request.prompt) for request in asked.requests]


async def _text(core: Core, model: str, prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case TokenPrompt(token_ids):
            return await core.detokenize(model, token_ids)
        case _:
            return ""


def completion_body(asked: Completions, answers: Sequence[Answer], echoed: Sequence[str]) -> bytes:
    """Returns the answers to the prompts, in the order of the prompts, as one."""
    first = answers[0].started
    choices = (
        _choice(asked, answer, choice, echo)
        for answer, echo in zip(answers, echoed, strict=True)
        for choice in _best(answer, asked.num_returned)
    )
    body = {
        "id": _DIALECT.id_prefix + first.generation_id,
        "object": _DIALECT.object,
        "created": first.created or int(time.time()),
        "model": first.model,
        "system_fingerprint": None,
        "choices": OneByOne(choice | {"index": i} for i, choice in enumerate(choices)),
        "usage": usage_body(_usage(asked, answers)),
    }
    return written(body)


def _best(answer: Answer, num_returned: int) -> list[int]:
    """Returns the choices to show: all, or those with the greatest mean log probability."""
    choices = sorted(answer.reasons)
    if len(choices) > num_returned:
        choices.sort(key=lambda choice: -_mean_logprob(answer.tokens[choice]))
    return choices[:num_returned]


def _mean_logprob(tokens: Sequence[Token]) -> float:
    known = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(known) / len(known) if known else float("-inf")


def _choice(asked: Completions, answer: Answer, choice: int, echo: str) -> dict[str, Any]:
    text, rows = ("", []) if asked.silent else aligned(answer.tokens[choice])
    scored = rows if asked.logprobs is not None else None
    form = _DIALECT.answer(choice, Message(Role.ASSISTANT, echo + text), scored, answer.reasons[choice])
    if asked.echo and scored is not None:
        form["logprobs"] = echoed_logprobs(answer.prompt, len(echo), scored)
    if asked.with_scores:
        form["prompt_logprobs"] = prompt_logprobs_body(answer.prompt)
    return form


def _usage(asked: Completions, answers: Sequence[Answer]) -> Usage:
    usages = [answer.usage for answer in answers]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        0 if asked.silent else sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_prompt_tokens for usage in usages),
        sum(usage.omitted_prompt_tokens for usage in usages),
    )
