"""The bodies of requests, as pydantic reads them: types only. Bounds are the domain's, see `sampling` and `prompts`.

Strict: a number in quotes is a mistake, not a number. Fields of the OpenAI API that this cluster does not have may be present
as long as they ask for nothing; see `refuse_unsupported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ryzanstein import errors


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair; no text that a node or a database takes has one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]

# Each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
# Fields that never change an answer.
_WITHOUT_EFFECT = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
# What a client sends back when it repeats a message that it was sent.
_MESSAGE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"annotations": ([],), "audio": (), "function_call": (), "name": (), "refusal": (), "tool_call_id": (), "tool_calls": ([],)}
)


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationOptions(Body):
    """What chat and completion requests share. None is the default of `SamplingParams`."""

    model: Text = ""
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Text | list[Text] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    user: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None


class ContentPart(Body):
    """One part of a message's content; `text` where `type` is "text"."""

    type: str
    text: Text | None = None


class ChatMessage(Body):
    role: str
    content: Text | list[ContentPart] | None = None


class ChatCompletionRequest(GenerationOptions):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    session_id: Text | None = None


class CompletionRequest(GenerationOptions):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = None


def refuse_unsupported(body: GenerationOptions) -> None:
    """Raises INVALID_ARGUMENT for a field that is unknown, or that asks for what this cluster does not have."""
    _refuse(body, _UNSUPPORTED, _WITHOUT_EFFECT, "")
    if body.stream_options is not None:
        _refuse(body.stream_options, MappingProxyType({"include_obfuscation": (False,)}), frozenset(), "stream_options.")
        if not body.stream:
            raise errors.invalid("stream_options", "is only for stream: true")


def refuse_unsupported_in_message(message: ChatMessage, path: str) -> None:
    """The same for a message at `path`."""
    _refuse(message, _MESSAGE_UNSUPPORTED, frozenset(), f"{path}.")


def _refuse(body: Body, unsupported: Mapping[str, tuple[Any, ...]], without_effect: frozenset[str], path: str) -> None:
    for name, value in (body.model_extra or {}).items():
        if value is None and (name in unsupported or name in without_effect):
            continue
        if name in unsupported:
            if value not in unsupported[name]:
                raise errors.invalid(f"{path}{name}", "is not supported")
        elif name not in without_effect:
            raise errors.invalid(f"{path}{name}"[:128], "is not a field of this request")
