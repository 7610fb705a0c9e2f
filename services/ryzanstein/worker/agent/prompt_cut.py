"""Cuts prompts that do not fit the model's context, where the request says how (`keep_prompt_head`).

Of a conversation whole turns are left out, the oldest first: what stands before the first user's
message stays, and every message that stays is whole, so that the chat template sees a conversation.
Of a text or of token ids the middle is left out.

What is left out depends on the prompt, the bounds of the request and the context alone. A later
attempt is told how many tokens the first one kept, and keeps the same ones.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, Role
from ryzanstein.generation.request import Attempt, SamplingParams
from ryzanstein.worker.agent.intake import ReadPrompt

ANSWER_TOKENS = 1024
"""What a request without `max_tokens` is left of the context for its answer, or a quarter of it if that is less."""
Read = Callable[[Prompt], Awaitable[ReadPrompt]]


async def fitted(attempt: Attempt, read: ReadPrompt, context_length: int, again: Read) -> ReadPrompt:
    """Returns the prompt, without what does not fit if the request wants it cut.

    `again` reads a shorter prompt. A conversation whose last turn alone does not fit is not cut: it
    is refused as a whole, unless the context alone holds it. Raises INVALID_ARGUMENT for a head for
    which there is no room, and for a last turn that is longer than `truncate_prompt_tokens`.
    """
    sampling, prompt = attempt.request.sampling, attempt.request.prompt
    if sampling.keep_prompt_head is None:
        return read
    limit = _limit(sampling, context_length, settled=attempt.accepted_before)
    if len(read.token_ids) <= limit:
        return read
    if isinstance(prompt, ChatPrompt):
        kept = await _last_turns(prompt, limit, again) or _whole(read, sampling)
    else:
        kept = replace(read, token_ids=_without_middle(read.token_ids, sampling.keep_prompt_head, limit))
    return replace(kept, num_omitted=len(read.token_ids) - len(kept.token_ids))


def _limit(sampling: SamplingParams, context_length: int, *, settled: bool) -> int:
    """Returns the most tokens that the prompt may have.

    `settled`: an earlier attempt was accepted, with the whole prompt or with what is now
    `truncate_prompt_tokens`. Another limit would be another prompt.
    """
    wanted = sampling.truncate_prompt_tokens
    if settled:
        return sys.maxsize if wanted is None else wanted
    answer = min(ANSWER_TOKENS, context_length // 4) if sampling.max_tokens is None else sampling.max_tokens
    room = max(1, context_length - answer)
    return room if wanted is None else min(wanted, room)


def _without_middle(token_ids: list[int], head: int, limit: int) -> list[int]:
    if head >= limit:
        raise errors.invalid("sampling.keep_prompt_head", f"must leave room in a prompt of at most {limit} tokens", head)
    return token_ids[:head] + token_ids[len(token_ids) - limit + head :]


def _whole(read: ReadPrompt, sampling: SamplingParams) -> ReadPrompt:
    """Returns a conversation of which no turn can be left out; the context may still hold it."""
    most = sampling.truncate_prompt_tokens
    if most is not None and len(read.token_ids) > most:
        raise errors.invalid("sampling.truncate_prompt_tokens", "must hold the last turn of the conversation", most)
    return read


async def _last_turns(prompt: ChatPrompt, limit: int, again: Read) -> ReadPrompt | None:
    """Returns the conversation with as many of its last turns as fit; None if not even the last one does.

    A turn begins with a user's message. It is found by bisection: more turns are more tokens.
    """
    begins = [i for i, message in enumerate(prompt.messages) if message.role is Role.USER]
    if len(begins) < 2:
        return None
    opening = prompt.messages[: begins[0]]
    found: ReadPrompt | None = None
    least, most = 1, len(begins) - 1  # how many turns are left out
    while least <= most:
        middle = most if found is None and least == 1 else (least + most) // 2
        read = await again(replace(prompt, messages=(*opening, *prompt.messages[begins[middle] :])))
        if len(read.token_ids) <= limit:
            found, most = read, middle - 1
        elif middle == len(begins) - 1:
            return None
        else:
            least = middle + 1
    return found
