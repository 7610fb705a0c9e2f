"""Converts a request's body and headers to a `GenerationRequest`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

from msgspec import Raw

from ryzanstein import clock, errors
from ryzanstein.generation.prompts import (
    MAX_NAME_CHARS,
    ChatPrompt,
    Prompt,
    TemplateOptions,
    TextPrompt,
    TokenPrompt,
    user_key,
    with_variables,
)
from ryzanstein.generation.request import MAX_CHOICES, MAX_LOGPROBS, GenerationRequest, SamplingParams, valid_priority
from ryzanstein.router.faces.openai.requests.messages import conversation
from ryzanstein.router.faces.openai.requests.sampling import sampling_params, token_ids_of, whole
from ryzanstein.router.faces.openai.requests.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
    Whole,
    refuse_unsupported,
)
from ryzanstein.router.faces.openai.requests.tools import tools_of, without_format
from ryzanstein.router.faces.origin import RequestOrigin
from ryzanstein.router.faces.request_key import HEADER, key_of_header, keyed

_TIERS = {"auto": 0, "default": 0, "scale": 0, "flex": -5, "priority": 5}
MAX_ANSWERS = 256
"""Of one completion request: prompts times choices."""
_MAX_TIMEOUT_MS = 86_400_000
_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Completions:
    """The generations that one completion request asks for, one for each prompt.

    Of each the `num_shown` best answers are shown, with `logprobs`, and after the prompt with
    `echo`. `silent`: not even one token of them. `with_scores`: each choice has the prompt's log
    probabilities.
    """

    requests: tuple[GenerationRequest, ...]
    num_returned: int
    logprobs: int | None
    echo: bool = False
    silent: bool = False
    with_scores: bool = False

    @property
    def only(self) -> GenerationRequest:
        """The one generation, for faces that show no other kind. Raises INVALID_ARGUMENT for more than that."""
        if len(self.requests) > 1:
            raise errors.invalid("prompt", "several prompts are not supported here", len(self.requests))
        if self.echo or self.num_returned != self.requests[0].sampling.n:
            raise errors.invalid("echo" if self.echo else "best_of", "is not supported here")
        return self.requests[0]


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def chat_request(
    body: ChatCompletionRequest, headers: Mapping[str, str], origin: RequestOrigin, max_messages: int
) -> GenerationRequest:
    """Returns the request of a chat body. Raises INVALID_ARGUMENT that names the field."""
    refuse_unsupported(body)
    messages = conversation(body.messages, max_messages)
    prompt = ChatPrompt(messages, template_options(body), tools_of(body))
    sampling = without_format(sampling_params(body, _max_tokens(body), _chat_logprobs(body)), prompt.tools)
    _refuse_streamed_scores(body, sampling)
    request = base_request(body, prompt, sampling, headers, origin)
    session_id = _session_id(body, headers)
    if session_id and prompt.template.continues:
        raise errors.invalid("continue_final_message", "is not supported in a session")
    return _keyed(replace(request, session_id=session_id), headers)


def completion_requests(body: CompletionRequest, headers: Mapping[str, str], origin: RequestOrigin) -> Completions:
    """Returns the requests of a completion body, with OpenAI's default of 16 tokens.

    Raises INVALID_ARGUMENT that names the field.
    """
    refuse_unsupported(body)
    max_tokens = whole("max_tokens", body.max_tokens)
    silent = bool(body.echo) and max_tokens == 0
    max_tokens = _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens or int(silent)
    logprobs = whole("logprobs", body.logprobs)
    sampling = sampling_params(body, max_tokens, logprobs)
    num_returned, best_of = sampling.n, whole("best_of", body.best_of)
    if best_of is not None and best_of != num_returned:
        sampling = _best_of(body, sampling, best_of)
    if body.echo and logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(logprobs, sampling.prompt_logprobs or 0))
    sampling.validate()
    _refuse_streamed_scores(body, sampling)
    if body.echo and (body.keep_prompt_head is not None or body.truncate_prompt_tokens is not None):
        raise errors.invalid("echo", "shows the whole prompt: it is not supported with a prompt that may be cut")
    prompts = _completion_prompts(body)
    if len(prompts) * sampling.n > MAX_ANSWERS:
        raise errors.invalid("prompt", f"prompts times choices must be at most {MAX_ANSWERS}", len(prompts) * sampling.n)
    if body.suffix is not None:
        prompts = [_with_suffix(prompt, body) for prompt in prompts]
    key = key_of_header(headers.get(HEADER))
    echo = bool(body.echo)
    requests = [replace(base_request(body, prompt, sampling, headers, origin), never_cut=echo) for prompt in prompts]
    if len(requests) > 1:
        requests = [keyed(each, f"{key}/{i}" if key else "", HEADER) for i, each in enumerate(requests)]
    else:
        requests = [keyed(requests[0], key, HEADER)]
    return Completions(tuple(requests), num_returned, logprobs, echo, silent, body.prompt_logprobs is not None)


def _with_suffix(prompt: Prompt, body: CompletionRequest) -> Prompt:
    if not body.suffix:
        return prompt  # "": nothing is asked for
    if not isinstance(prompt, TextPrompt):
        raise errors.invalid("suffix", "needs a prompt of text")
    if body.echo:
        raise errors.invalid("echo", "is not supported with a suffix")
    if body.truncate_prompt_tokens is not None:
        raise errors.invalid("truncate_prompt_tokens", "is not supported with a suffix")
    if body.keep_prompt_head is not None:
        raise errors.invalid("keep_prompt_head", "is not supported with a suffix")
    return replace(prompt, suffix=body.suffix)


def _best_of(body: CompletionRequest, sampling: SamplingParams, best_of: int) -> SamplingParams:
    """Returns the parameters that generate so many answers and tell how likely each is."""
    if best_of < sampling.n:
        raise errors.invalid("best_of", f"must be at least n ({sampling.n})", best_of)
    if body.stream:
        raise errors.invalid("best_of", "cannot be streamed: which answers are best is known at the end", best_of)
    if best_of > MAX_CHOICES:
        raise errors.invalid("best_of", f"must be in [1, {MAX_CHOICES}]", best_of)
    return replace(sampling, n=best_of, logprobs=sampling.logprobs or 0)


def _refuse_streamed_scores(body: GenerationOptions, sampling: SamplingParams) -> None:
    if body.stream and sampling.prompt_logprobs is not None:
        field = "prompt_logprobs" if body.prompt_logprobs is not None else "echo"
        raise errors.invalid(field, "log probabilities of the prompt are not available with stream: true")


def base_request(
    body: GenerationOptions, prompt: Prompt, sampling: SamplingParams, headers: Mapping[str, str], origin: RequestOrigin
) -> GenerationRequest:
    """Returns a request without a session and without a key.

    Raises INVALID_ARGUMENT that names the field, and what `RequestOrigin.owned` raises.
    """
    traceparent = headers.get("traceparent", "")
    request = GenerationRequest(
        model=name_of(body.model or "", "model"),
        prompt=prompt,
        sampling=sampling,
        user=user_key(body.user or "", "user"),
        priority=valid_priority(_priority(body)),
    )
    return origin.owned(request, traceparent if _TRACEPARENT.fullmatch(traceparent) else "", deadline_of(headers))


def _priority(body: GenerationOptions) -> int:
    """Returns the priority, where it is not given that of the service tier."""
    tier = body.service_tier or "auto"
    if tier not in _TIERS:
        raise errors.invalid("service_tier", f"must be one of {', '.join(_TIERS)}", tier[:64])
    given = whole("priority", body.priority)
    return _TIERS[tier] if given is None else given


def _keyed(request: GenerationRequest, headers: Mapping[str, str]) -> GenerationRequest:
    return keyed(request, key_of_header(headers.get(HEADER)), HEADER)


def _completion_prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    kinds = {int if isinstance(each, float) else type(each) for each in given}
    if len(kinds) > 1:
        raise errors.invalid("prompt", "must be a string, a list of token ids, or a list of these")
    if kinds == {int}:
        given = [cast("list[Whole]", given)]
    may_be_empty = bool(body.suffix)  # the beginning of a file is filled in, too
    if not given or not (may_be_empty or all(cast("list[str | list[Whole]]", given))):
        raise errors.invalid("prompt", "must not be empty")
    return [
        TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(token_ids_of("prompt", prompt))
        for prompt in cast("list[str | list[Whole]]", given)
    ]


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old = whole("max_tokens", body.max_tokens)
    new = whole("max_completion_tokens", body.max_completion_tokens)
    if old is not None and new is not None and old != new:
        raise errors.invalid("max_completion_tokens", f"conflicts with max_tokens ({old})", new)
    return old if new is None else new


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    top = whole("top_logprobs", body.top_logprobs) or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise errors.invalid("top_logprobs", f"must be in [0, {MAX_LOGPROBS}]", top)
    if body.logprobs:
        return top
    if top:
        raise errors.invalid("top_logprobs", "requires logprobs: true")
    return None


def _session_id(body: ChatCompletionRequest, headers: Mapping[str, str]) -> str:
    """Returns the session id from the body or the header.

    The header is for clients that do not let extra fields through.
    """
    in_header = headers.get("x-session-id", "")
    if body.session_id and in_header and body.session_id != in_header:
        raise errors.invalid("session_id", "conflicts with the header X-Session-Id")
    return name_of(body.session_id or in_header, "session_id")


class TemplateFields(Protocol):
    """A body that says what its chat template is given besides the messages."""

    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> Raw | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def template_options(body: TemplateFields) -> TemplateOptions:
    """Returns what the chat template is given besides the messages. Raises INVALID_ARGUMENT."""
    raw = bytes(body.chat_template_kwargs or b"")
    try:
        variables = "" if raw in (b"", b"null", b"{}") else raw.decode()
    except UnicodeDecodeError:
        raise errors.invalid("chat_template_kwargs", "must be UTF-8") from None
    adds = True if body.add_generation_prompt is None else body.add_generation_prompt
    options = TemplateOptions(with_effort(variables, body.reasoning_effort), adds, bool(body.continue_final_message))
    options.validate()
    return options


def with_effort(variables: str, effort: str | None) -> str:
    """Returns the variables of a template with the effort that it is to make the model take.

    Few templates know efforts, many whether the model thinks: that is said too, as vLLM does. What the client says
    of either by itself counts.
    """
    if not effort:
        return variables
    thinks = effort != "none"
    return with_variables(variables, {"enable_thinking": thinks} | ({"reasoning_effort": effort} if thinks else {}))


def name_of(value: str, field: str) -> str:
    """Returns the name of a model or session. Raises INVALID_ARGUMENT for one that is too long."""
    if len(value) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(value))
    return value


def deadline_of(headers: Mapping[str, str]) -> float | None:
    """Returns the deadline in Unix seconds, or None for the core's default."""
    value = headers.get("x-request-timeout-ms")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and 1 <= int(value) <= _MAX_TIMEOUT_MS):
        raise errors.invalid("X-Request-Timeout-Ms", f"must be an integer in [1, {_MAX_TIMEOUT_MS}]", value[:32])
    return clock.unix_s() + int(value) / 1000
