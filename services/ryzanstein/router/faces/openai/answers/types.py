"""What answers look like, for /openapi.json. The dialects write them; a test reads real answers as these types.

`Any` is what an answer repeats of its request.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class AnswerType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of all answers."""


class PromptDetails(AnswerType, frozen=True):
    cached_tokens: int


class UsageAnswer(AnswerType, frozen=True):
    """Tokens that were read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenAlternative(AnswerType, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(AnswerType, frozen=True):
    """The log probability of a token, and of the likeliest ones in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(AnswerType, frozen=True):
    content: list[TokenEntry]
    refusal: None


class FunctionCall(AnswerType, frozen=True):
    name: str
    arguments: str


class ToolCallAnswer(AnswerType, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessageAnswer(AnswerType, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


FinishReasonName = Literal["stop", "length", "cancelled", "tool_calls"]


class ChatChoice(AnswerType, frozen=True):
    index: int
    message: ChatMessageAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName


class RankedToken(AnswerType, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class ChatCompletion(AnswerType, frozen=True):
    """The answer to a conversation. With `stream` it comes as events of `chat.completion.chunk`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextLogprobs(AnswerType, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(AnswerType, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasonName
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(AnswerType, frozen=True):
    """The continuations of texts. With `stream` they come as events of the same kind."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[TextChoice]
    usage: UsageAnswer


class OutputText(AnswerType, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[Any] | UnsetType = UNSET


class OutputMessage(AnswerType, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(AnswerType, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningText(AnswerType, frozen=True):
    type: str
    text: str


class OutputReasoning(AnswerType, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[ReasoningText] | UnsetType = UNSET
    status: str | UnsetType = UNSET


class InputDetails(AnswerType, frozen=True):
    cached_tokens: int


class OutputDetails(AnswerType, frozen=True):
    reasoning_tokens: int


class ResponseUsage(AnswerType, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseAnswer(AnswerType, frozen=True):
    """A response. With `stream` it comes as OpenAI's typed events."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: Any
    incomplete_details: Any
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class InputItemList(AnswerType, frozen=True):
    """A page of what a response answered."""

    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(AnswerType, frozen=True):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class CancelledWork(AnswerType, frozen=True):
    """A generation or response that is cancelled."""

    id: str
    object: Literal["generation", "response"]
    status: Literal["cancelled"]


class ModelAnswer(AnswerType, frozen=True):
    """A model that at least one ready node serves.

    `sampling_defaults` are its own values of parameters that a request leaves out. `parent`: it is an adapter of this model.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    context_length: int
    ready_nodes: int
    sampling_defaults: dict[str, float] | UnsetType = UNSET


class ModelList(AnswerType, frozen=True):
    """The models that ready nodes serve."""

    object: Literal["list"]
    data: list[ModelAnswer]


class TokenizeAnswer(AnswerType, frozen=True):
    """The tokens of a prompt."""

    count: int
    tokens: list[int]
    max_model_len: int | None
    token_strs: list[str] | None


class DetokenizeAnswer(AnswerType, frozen=True):
    """The text of tokens."""

    prompt: str


class ErrorBody(AnswerType, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None
    metadata: dict[str, str] | UnsetType = UNSET


class ErrorAnswer(AnswerType, frozen=True):
    """What is wrong, and with which field."""

    error: ErrorBody
