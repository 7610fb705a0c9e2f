"""Request bodies for msgspec: types and maximum counts. The domain checks the rest, see `sampling`.

Decoding is strict: a number in quotes is an error, not a number. It stops at the first error.
Fields of the OpenAI API that this cluster does not have are skipped without being built. They may
be present as long as they request nothing; see `refuse_unsupported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from ryzanstein import errors
from ryzanstein.constraints import MAX_ALTERNATIVES
from ryzanstein.generation.prompts import MAX_TOOL_CALLS
from ryzanstein.generation.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from ryzanstein.generation.tools import MAX_TOOLS

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)] | Annotated[float, Meta(ge=0, le=2**32 - 1)]
"""Also as 5.0, like every integer; see `Whole`. `sampling.token_ids_of` refuses 5.5."""
Whole = int | float
"""An integer, also as 5.0: some JSON libraries write no other numbers. `sampling.whole` refuses 5.5."""

# Each field with the values that request nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "include_reasoning": (True,),
        "length_penalty": (1,),
        "modalities": (["text"], []),
        "moderation": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "use_beam_search": (False,),
        "web_search_options": (),
    }
)
_CHAT_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"best_of": (1,), "echo": (False,), "suffix": ("",)})
# Fields that a client sends back when it repeats a message that it received.
_MESSAGE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"function_call": ({},)})
_STREAM_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"include_obfuscation": (False,)})
# No value that requests nothing is longer than this, white space included.
_MAX_IDLE_BYTES = 256
_value = msgspec.json.Decoder()
# msgspec has no union of Raw and None; a field that the body does not have is None all the same.
_ABSENT: Any = None


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of all bodies."""


class StreamOptions(Body, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Raw = _ABSENT


class GenerationOptions(Body, frozen=True, kw_only=True):
    """The options that chat and completion requests share.

    None means the default of `SamplingParams`.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Whole | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Whole | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Whole | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions of the OpenAI API.
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    # Constraints, see `response_format`.
    response_format: Raw = _ABSENT
    structured_outputs: Raw = _ABSENT
    guided_json: Raw = _ABSENT
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=MAX_ALTERNATIVES)] | None = None
    guided_grammar: str | None = None
    priority: Whole | None = None
    service_tier: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    truncate_prompt_tokens: Whole | None = None
    keep_prompt_head: Whole | None = None
    prompt_logprobs: Whole | None = None
    # Refused unless they request nothing.
    audio: Raw = _ABSENT
    function_call: Raw = _ABSENT
    functions: Raw = _ABSENT
    modalities: Raw = _ABSENT
    moderation: Raw = _ABSENT
    web_search_options: Raw = _ABSENT
    include_reasoning: Raw = _ABSENT
    length_penalty: Raw = _ABSENT
    return_token_ids: Raw = _ABSENT
    return_tokens_as_token_ids: Raw = _ABSENT
    spaces_between_special_tokens: Raw = _ABSENT
    use_beam_search: Raw = _ABSENT
    # Labels and hints: these never change an answer. docs/reference/http.md lists them.
    store: bool | None = None
    metadata: Raw = _ABSENT
    prediction: Raw = _ABSENT
    prompt_cache_key: Raw = _ABSENT
    prompt_cache_options: Raw = _ABSENT
    prompt_cache_retention: Raw = _ABSENT
    safety_identifier: Raw = _ABSENT
    client_metadata: Raw = _ABSENT
    litellm_metadata: Raw = _ABSENT
    request_id: Raw = _ABSENT
    guided_decoding_backend: Raw = _ABSENT
    verbosity: Raw = _ABSENT


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content.

    `text` is set where `type` is "text", `refusal` and the rest where an assistant's part is of that
    type. Other fields are skipped.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: Raw = _ABSENT
    reasoning: Raw = _ABSENT


class OfferedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`parameters` is a JSON schema, which is only checked to be an object."""

    name: str
    description: str | None = None
    parameters: Raw = _ABSENT
    strict: bool | None = None


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool. `function` is set where `type` is "function". Fields of other types are skipped."""

    type: str
    function: OfferedFunction | None = None


class ChosenFunction(Body, frozen=True):
    name: str


class ToolChoice(Body, frozen=True):
    type: str
    function: ChosenFunction | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments` is a string of JSON; some clients send the object."""

    name: str
    arguments: Raw = _ABSENT


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message repeats. Fields of other types of calls are skipped."""

    id: str | None = None
    type: str | None = "function"
    function: CalledFunction | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """A message. Other fields, which a client repeats of a message that it received, are skipped."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Text that other servers and SDKs put elsewhere, see `messages`.
    audio: Raw = _ABSENT
    reasoning: Raw = _ABSENT
    reasoning_details: Raw = _ABSENT
    refusal: Raw = _ABSENT
    thinking_blocks: Raw = _ABSENT
    # Refused unless it requests nothing.
    function_call: Raw = _ABSENT


class ChatCompletionRequest(GenerationOptions, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    session_id: str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raw = _ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    best_of: Raw = _ABSENT
    echo: Raw = _ABSENT
    suffix: Raw = _ABSENT


class CompletionRequest(GenerationOptions, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Whole | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    suffix: str | None = None


def refuse_unsupported(body: GenerationOptions) -> None:
    """Raises INVALID_ARGUMENT for a field that requests what this cluster does not have."""
    refuse(body, _UNSUPPORTED, "")
    if isinstance(body, ChatCompletionRequest):
        refuse(body, _CHAT_UNSUPPORTED, "")
    if body.stream_options is not None:
        refuse(body.stream_options, _STREAM_UNSUPPORTED, "stream_options.")
        if not body.stream:
            raise errors.invalid("stream_options", "requires stream: true")


def refuse_unsupported_in_message(message: ChatMessage, path: str) -> None:
    """Raises INVALID_ARGUMENT for such a field in the message at `path`."""
    refuse(message, _MESSAGE_UNSUPPORTED, f"{path}.")


def refuse(body: msgspec.Struct, unsupported: Mapping[str, tuple[Any, ...]], path: str) -> None:
    """Raises INVALID_ARGUMENT for a field that is not one of the values that request nothing."""
    for name, idle in unsupported.items():
        given = getattr(body, name)
        if given is not None and not _is_idle(bytes(given), idle):
            raise errors.invalid(f"{path}{name}", "is not supported")


def _is_idle(given: bytes, idle: tuple[Any, ...]) -> bool:
    return given == b"null" or (len(given) <= _MAX_IDLE_BYTES and _value.decode(given) in idle)
