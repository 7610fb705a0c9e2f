"""Makes the messages of requests from what people write in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from ryzanstein.client.tools import tool_of
from ryzanstein.v1 import inference_pb2 as pb

Messages = str | Sequence[pb.Message | Mapping[str, Any]]
"""A user's text, or a conversation: messages, or dicts with `role` and `content` as OpenAI's clients have them."""


class Options(TypedDict, total=False):
    """Options of a request. Those of sampling are explained in `SamplingParams`; what is left out is the model's own."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    logprobs: int
    prompt_logprobs: int
    n: int
    ignore_eos: bool
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    truncate_prompt_tokens: int
    keep_prompt_head: int
    json_schema: Mapping[str, Any]
    """The answer is JSON that this schema admits."""
    tools: Sequence[pb.Tool | Mapping[str, Any] | Callable[..., Any]]
    tool_choice: str
    """auto, none, required, or the name of a function."""
    parallel_tool_calls: bool
    session: str
    user: str
    priority: int
    request_id: str | None
    """The idempotency key. None: none. Left out: one of the client's own, but none while routers keep none."""
    timeout_s: float | None


_OF_SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"constraint"}
_LISTS = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_token_ids"})
_OF_REQUEST = {"model": "model", "user": "user", "priority": "priority", "session": "session_id"}
_OF_CHAT = frozenset({"tools", "tool_choice", "parallel_tool_calls", "session"})
_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
_ROLES = {name.removeprefix("ROLE_").lower(): number for name, number in pb.Role.items()} | {"developer": pb.ROLE_SYSTEM}


def chat_request(messages: Messages, options: Mapping[str, Any]) -> pb.ChatRequest:
    """Returns the request. Raises TypeError for an option that does not exist, ValueError for a value that cannot be one."""
    request = pb.ChatRequest(messages=messages_of(messages))
    _apply(request, options)
    request.tools.extend(map(tool_of, options.get("tools") or ()))
    if choice := options.get("tool_choice"):
        named = choice not in _MODES
        request.tool_choice.mode = pb.TOOL_MODE_FUNCTION if named else _MODES[choice]
        request.tool_choice.name = choice if named else ""
    if (parallel := options.get("parallel_tool_calls")) is not None:
        request.parallel_tool_calls = parallel
    return request


def complete_request(prompt: str | Sequence[int], options: Mapping[str, Any]) -> pb.CompleteRequest:
    """Returns the request for a text or token ids. Raises as `chat_request`."""
    request = pb.CompleteRequest(text=prompt) if isinstance(prompt, str) else pb.CompleteRequest()
    if not isinstance(prompt, str):
        request.token_ids.ids.extend(prompt)
    for name in _OF_CHAT & options.keys():
        raise TypeError(f"{name}: is an option of chat, not of complete")
    _apply(request, options)
    return request


def messages_of(messages: Messages) -> list[pb.Message]:
    """Returns the messages of a conversation. Raises ValueError for a role that does not exist, and for what is no text."""
    if isinstance(messages, str):
        return [pb.Message(role=pb.ROLE_USER, content=messages)]
    return [each if isinstance(each, pb.Message) else _message(each) for each in messages]


def _message(given: Mapping[str, Any]) -> pb.Message:
    role = given.get("role")
    if role not in _ROLES or role == "unspecified":
        raise ValueError(f"messages: role must be system, user, assistant or tool, got {role!r}")
    content = given.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(map(_text_of, content))
    message = pb.Message(role=pb.Role.ValueType(_ROLES[role]), content=content or "")
    message.tool_call_id, message.name = given.get("tool_call_id") or "", given.get("name") or ""
    message.reasoning = given.get("reasoning") or ""
    for call in given.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        message.tool_calls.add(id=call.get("id", ""), name=function["name"], arguments=text)
    return message


def _text_of(part: Mapping[str, Any]) -> str:
    if not isinstance(part.get("text"), str):
        raise ValueError(f"messages: a part of type {part.get('type')!r} is not text")
    return str(part["text"])


def _apply(request: pb.ChatRequest | pb.CompleteRequest, options: Mapping[str, Any]) -> None:
    known = Options.__optional_keys__
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{name}: no such option; there are {', '.join(sorted(known))}")
        if value is None:
            continue
        try:
            if name in _OF_REQUEST:
                setattr(request, _OF_REQUEST[name], value)
            elif name in _OF_SAMPLING:
                _set(request.sampling, name, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {value!r} cannot be its value: {error}"[:512]) from None
    if (schema := options.get("json_schema")) is not None:
        request.sampling.constraint.json_schema = json.dumps(schema)
    request.request_id = options.get("request_id", os.urandom(16).hex()) or ""


def _set(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        getattr(sampling, name).update(value)
    elif name in _LISTS:
        getattr(sampling, name).extend([value] if isinstance(value, str) else value)
    else:
        setattr(sampling, name, value)
