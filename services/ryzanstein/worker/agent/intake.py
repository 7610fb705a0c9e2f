"""Turns what a router submits into what the engine runs.

Tokenizes the prompt, checks it against the context and resolves defaults. Plain functions of the
request and the model; they raise the errors that clients see.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ryzanstein import clock, errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import Attempt, SamplingParams
from ryzanstein.generation.tokens import MAX_PROMPT_SCORES
from ryzanstein.worker.agent.tokenizing import encoded
from ryzanstein.worker.engine.memory.prefix import scope_root
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.text.calling import Calling, has_calls
from ryzanstein.worker.text.choice import ChoiceText, TextOptions, resumed
from ryzanstein.worker.text.control import LONG_CHARS
from ryzanstein.worker.text.templates.rendering import ChatRenderer, Rendered
from ryzanstein.worker.text.tokenizer import TextModel

if TYPE_CHECKING:
    from ryzanstein.worker.text.grammars.enforcing import Judged
    from ryzanstein.worker.text.grammars.judge import ConstraintJudge


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's token ids, and how answers to it are read; None: as content alone.

    `calling` describes how the prompt lists a chat's functions and how an answer calls them. `num_omitted` counts the
    tokens that were left out of a prompt that did not fit: see `prompt_cut`.
    """

    token_ids: list[int]
    reply: ReplyStyle | None = None
    calling: Calling | None = None
    num_omitted: int = 0

    @property
    def calls(self) -> bool:
        """Whether an answer may call functions."""
        return self.reply is not None and bool(self.reply.calls)


@dataclass(frozen=True, slots=True)
class Arrived:
    """An attempt in the model's terms. `judged` is None without a constraint."""

    attempt: Attempt
    text: TextModel
    read: ReadPrompt
    texts: Sequence[ChoiceText]
    judged: Judged | None


async def arrive(attempt: Attempt, text: TextModel, templates: ChatRenderer, judge: ConstraintJudge) -> Arrived:
    """Returns the attempt with its prompt tokenized and its constraint compiled.

    Raises INVALID_ARGUMENT for what the model cannot read, and the errors of `enforcing.enforced`.
    """
    sampling = attempt.request.sampling
    cuts = sampling.keep_prompt_head is not None
    keep = None if cuts else sampling.truncate_prompt_tokens
    read = await tokenize(attempt.request.prompt, text, templates, keep, any_length=cuts)
    judged = None
    if has_grammar(attempt):
        from ryzanstein.worker.text.grammars.enforcing import enforced

        attempt, judged = await enforced(attempt, read.reply, text, judge)
    return Arrived(attempt, text, read, await texts_of(attempt, text, read.calling), judged)


async def tokenize(
    prompt: Prompt, model: TextModel, templates: ChatRenderer, keep: int | None = None, *, any_length: bool = False
) -> ReadPrompt:
    """Returns the prompt's token ids; with `keep` only so many of the last ones. `any_length`: they will be cut.

    A long text is tokenized in a thread, so that the loop goes on. Raises INVALID_ARGUMENT for a
    prompt that the model cannot read or that is empty.
    """
    if isinstance(prompt, TokenPrompt) and keep is not None:
        prompt = TokenPrompt(prompt.token_ids[-keep:])
    read = await _read(prompt, model, templates, any_length=any_length)
    if keep is not None:
        read = replace(read, token_ids=read.token_ids[-keep:])
    if not read.token_ids:
        raise errors.invalid("prompt", "must have at least one token")
    return read


async def _read(prompt: Prompt, model: TextModel, templates: ChatRenderer, *, any_length: bool) -> ReadPrompt:
    match prompt:
        case ChatPrompt():
            rendered, calling = await _described(prompt, model, templates)
            ids = await encoded(model.encode_rendered, rendered, len(rendered.text))
            return ReadPrompt(ids, calling.style(prompt, rendered.text), calling)
        case TextPrompt(text):
            return ReadPrompt(await encoded(model.encode, text, len(text)))
        case TokenPrompt(token_ids):
            return ReadPrompt(model.checked_ids(token_ids, any_length=any_length))


async def _described(prompt: ChatPrompt, model: TextModel, templates: ChatRenderer) -> tuple[Rendered, Calling]:
    """Returns the conversation's text, and how functions are called in it.

    In the generic form where the template does not show the tools, or refuses their calls.
    """
    calling = model.calling_of(prompt)
    if not calling.native or not (prompt.tools.offered or has_calls(prompt)):
        return await _rendered(prompt, model, templates, calling), calling
    try:
        rendered = await _rendered(prompt, model, templates, calling)
        if rendered.shows_tools:
            return rendered, calling
        return await _rendered(prompt, model, templates, calling.generic()), calling.generic()
    except RyzansteinError as error:
        if error.code is not Code.INVALID_ARGUMENT:
            raise
        with suppress(RyzansteinError):
            return await _rendered(prompt, model, templates, calling.generic()), calling.generic()
        raise


async def _rendered(prompt: ChatPrompt, model: TextModel, templates: ChatRenderer, calling: Calling) -> Rendered:
    """Returns the conversation's text, as this way of calling tells it."""
    given = calling.described(prompt)
    try:
        return await templates.render(model.checked_chat(given), given)
    except RyzansteinError as error:
        if error.code is not Code.INVALID_ARGUMENT or given.messages == prompt.messages:
            raise
        raise errors.about_field(error, "messages") from None  # its index is that of another message


def is_long(attempt: Attempt) -> bool:
    """Returns whether the prompt's text takes long to tokenize."""
    prompt = attempt.request.prompt
    match prompt:
        case ChatPrompt():
            return sum(message.num_chars for message in prompt.messages) > LONG_CHARS
        case TextPrompt(text):
            return len(text) > LONG_CHARS
        case _:
            return False


def has_grammar(attempt: Attempt) -> bool:
    """Returns whether the answer follows a constraint, or has to be a call."""
    prompt = attempt.request.prompt
    return attempt.request.sampling.constraint is not None or (isinstance(prompt, ChatPrompt) and prompt.tools.must)


def reply_of(read: ReadPrompt, attempt: Attempt) -> ReplyStyle | None:
    """Returns how the attempt's answers are read.

    A constraint says where an answer begins: with its first token, there is no room for reasoning.
    """
    constraint = attempt.request.sampling.constraint
    if read.reply is None or constraint is None or constraint.after:
        return read.reply
    return replace(read.reply, thinking=False, opened=False) if read.reply.calls else None


async def texts_of(attempt: Attempt, model: TextModel, calling: Calling | None = None) -> list[ChoiceText]:
    """Returns the choices' texts so far. The text of a finished choice is not needed.

    `calling`: other than the model's.
    """
    sampling = attempt.request.sampling
    ends = _stop_ids(sampling, model)
    special = not sampling.skip_special_tokens or model.shows_special(attempt.request.prompt, calling or model.calling)
    options = TextOptions(sampling.stop, sampling.include_stop_str_in_output, special, frozenset(ends), sampling.min_tokens)
    return [await resumed(model, options, () if each.finished else each.token_ids) for each in attempt.generated]


def _stop_ids(sampling: SamplingParams, model: TextModel) -> set[int]:
    return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(model.eos_token_ids))


def group_of(
    attempt: Attempt,
    group: int,
    prompt_ids: list[int],
    model: TextModel,
    context_length: int,
    *,
    judged: Judged | None = None,
) -> SubmitGroup:
    """Returns the attempt as the engine runs it.

    Raises CONTEXT_TOO_LONG with both numbers, INVALID_ARGUMENT for a token id outside the
    vocabulary.
    """
    request = attempt.request
    sampling = request.sampling
    if sampling.prompt_logprobs is not None and len(prompt_ids) * (1 + sampling.prompt_logprobs) > MAX_PROMPT_SCORES:
        bound = f"the prompt's tokens times one more than this must be at most {MAX_PROMPT_SCORES}"
        raise errors.invalid("sampling.prompt_logprobs", bound, sampling.prompt_logprobs)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, model.vocab_size)
    _check_ids("sampling.logit_bias", (token_id for token_id, _ in sampling.logit_bias), model.vocab_size)
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, model.vocab_size)
    for choice in attempt.generated:
        _check_ids("generated", choice.token_ids, model.vocab_size)
    if all(choice.finished for choice in attempt.generated):
        raise errors.invalid("generated", "must leave at least one choice unfinished")
    return SubmitGroup(
        group=group,
        prompt_ids=prompt_ids,
        sampling=_with_seed(sampling),
        max_tokens=_max_tokens(sampling, len(prompt_ids), context_length, model.answer_tokens),
        stop_token_ids=sorted(_stop_ids(sampling, model)),
        generated=[list(choice.token_ids) for choice in attempt.generated],
        finished=[choice.finished for choice in attempt.generated],
        deadline=_monotonic(request.deadline),
        priority=request.priority,
        tenant=request.tenant,
        cache_root=scope_root(request.cache_scope, request.adapter_digest),
        accepted_before=attempt.accepted_before,
        traceparent=request.traceparent,
        grammar_bytes=0 if judged is None else judged.verdict.grammar_bytes,
        bad_sequences=model.bad_sequences(sampling.bad_words),
    )


def _monotonic(unix_s: float | None) -> float | None:
    """Converts a deadline to the monotonic clock, which is never set.

    So an accepted attempt does not become late because the wall clock jumps.
    """
    return None if unix_s is None else time.monotonic() + unix_s - clock.unix_s()


def _max_tokens(sampling: SamplingParams, prompt_tokens: int, context_length: int, usual: int | None) -> int:
    """Returns the requested number of tokens; by default what is left of the context, or `usual` if that is less."""
    left = max(1, context_length - prompt_tokens)
    default = left if usual is None else min(left, max(usual, sampling.min_tokens))
    wanted = default if sampling.max_tokens is None else sampling.max_tokens
    if prompt_tokens + wanted > context_length:
        raise errors.context_too_long(prompt_tokens, wanted, context_length)
    return wanted


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Fills in a random seed if there is none.

    Routers always set one. A client that calls a node directly need not, and then cannot continue
    on another node.
    """
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(64))


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise errors.invalid(field, f"each token id must be in [0, {vocab_size})", token_id)
