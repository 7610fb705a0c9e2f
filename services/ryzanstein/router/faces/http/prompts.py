"""Converts a request's body and headers to a `GenerationRequest`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from ryzanstein import clock, errors
from ryzanstein.generation import (
    MAX_NAME_CHARS,
    TENANT_ID,
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    Role,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    ToolCall,
    valid_priority,
    valid_tenant,
)
from ryzanstein.router.faces.http.sampling import sampling_params
from ryzanstein.router.faces.http.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    GenerationOptions,
    MessageToolCall,
    refuse_unsupported,
    refuse_unsupported_in_message,
)
from ryzanstein.router.faces.request_key import HEADER, key_of_header, keyed

# Newer OpenAI clients call the system role "developer".
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_MAX_TIMEOUT_MS = 86_400_000
_DEFAULT_COMPLETION_TOKENS = 16
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def chat_request(
    body: ChatCompletionRequest, headers: Mapping[str, str], request_id: str, max_messages: int
) -> GenerationRequest:
    """Returns the request of a chat body. Raises INVALID_ARGUMENT that names the field."""
    refuse_unsupported(body)
    if not body.messages:
        raise errors.invalid("messages", "must have at least one message")
    if len(body.messages) > max_messages:
        raise errors.invalid("messages", f"must have at most {max_messages} messages", len(body.messages))
    prompt = ChatPrompt(tuple(_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)))
    sampling = sampling_params(body, _max_tokens(body), _chat_logprobs(body))
    request = _request(body, prompt, sampling, headers, request_id)
    return _keyed(replace(request, session_id=_session_id(body, headers)), headers)


def completion_request(body: CompletionRequest, headers: Mapping[str, str], request_id: str) -> GenerationRequest:
    """Returns the request of a completion body, with OpenAI's default of 16 tokens.

    Raises INVALID_ARGUMENT that names the field.
    """
    refuse_unsupported(body)
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_params(body, max_tokens, body.logprobs)
    return _keyed(_request(body, _completion_prompt(body), sampling, headers, request_id), headers)


def _request(
    body: GenerationOptions,
    prompt: Prompt,
    sampling: SamplingParams,
    headers: Mapping[str, str],
    request_id: str,
) -> GenerationRequest:
    traceparent = headers.get("traceparent", "")
    user = _name(body.user or "", "user")
    return GenerationRequest(
        model=_name(body.model, "model"),
        prompt=prompt,
        sampling=sampling,
        user=user,
        priority=valid_priority(body.priority or 0),
        tenant=valid_tenant(headers.get(TENANT_ID, ""), user),
        deadline=_deadline(headers),
        request_id=request_id,
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
    )


def _keyed(request: GenerationRequest, headers: Mapping[str, str]) -> GenerationRequest:
    return keyed(request, key_of_header(headers.get(HEADER)), HEADER)


def _message(message: ChatMessage, path: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise errors.invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}", message.role[:64])
    refuse_unsupported_in_message(message, path)
    content = message.content
    if content is None:
        if role is not Role.ASSISTANT:
            raise errors.invalid(f"{path}.content", "must be a string or a list of text parts")
        content = ""
    if not isinstance(content, str):
        content = "\n".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if message.reasoning_content and role is not Role.ASSISTANT:
        raise errors.invalid(f"{path}.reasoning_content", "is only for the role assistant", message.role)
    calls = tuple(_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ()))
    known = Message(role, content, calls, message.tool_call_id or "", message.name or "", message.reasoning_content or "")
    known.validate(path)
    return known


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type != "function":
        raise errors.invalid(f"{path}.type", "only calls of functions are supported", call.type[:64])
    if call.function is None:
        raise errors.invalid(f"{path}.function", "is required")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise errors.invalid(f"{path}.type", "only text parts are supported", part.type[:64])
    if part.text is None:
        raise errors.invalid(f"{path}.text", "must be a string")
    return part.text


def _completion_prompt(body: CompletionRequest) -> Prompt:
    prompt = body.prompt if isinstance(body.prompt, str) else _only(body.prompt)
    if not prompt:
        raise errors.invalid("prompt", "must not be empty")
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(tuple(prompt))


def _only(prompt: Sequence[str | int | list[int]]) -> str | Sequence[int]:
    """Returns the token ids, or the one prompt in the list."""
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return cast(Sequence[int], prompt)
    if len(kinds) > 1:
        raise errors.invalid("prompt", "must be a string, a list of token ids, or a list with one of these")
    if len(prompt) > 1:
        raise errors.invalid("prompt", "several prompts in one request are not supported", len(prompt))
    return cast(str | list[int], prompt[0]) if prompt else []


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise errors.invalid("max_completion_tokens", f"conflicts with max_tokens ({old})", new)
    return old if new is None else new


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise errors.invalid("top_logprobs", "requires logprobs: true")
    return None


def _session_id(body: ChatCompletionRequest, headers: Mapping[str, str]) -> str:
    """Returns the session id from the body or the header.

    The header is for clients that do not let extra fields through.
    """
    in_header = headers.get("x-session-id", "")
    if body.session_id and in_header and body.session_id != in_header:
        raise errors.invalid("session_id", "conflicts with the header X-Session-Id")
    return _name(body.session_id or in_header, "session_id")


def _name(value: str, field: str) -> str:
    if len(value) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(value))
    return value


def _deadline(headers: Mapping[str, str]) -> float | None:
    """Returns the deadline in Unix seconds, or None for the core's default."""
    value = headers.get("x-request-timeout-ms")
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and 1 <= int(value) <= _MAX_TIMEOUT_MS):
        raise errors.invalid("X-Request-Timeout-Ms", f"must be an integer in [1, {_MAX_TIMEOUT_MS}]", value[:32])
    return clock.unix_s() + int(value) / 1000
