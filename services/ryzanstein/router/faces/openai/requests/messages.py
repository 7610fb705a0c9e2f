"""Converts the messages of a chat body to those of a conversation.

Clients send back what they received, from this server or another, with fields that only their makers
know. Such fields are skipped. What is text of a message is kept, wherever it stands, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ryzanstein import errors
from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.router.faces.openai.requests.schemas import (
    ChatMessage,
    ContentPart,
    MessageToolCall,
    refuse_unsupported_in_message,
)

# Newer OpenAI clients call the system role "developer".
_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_THOUGHT_PARTS = frozenset({"thinking", "reasoning", "redacted_thinking"})
# Where servers put the reasoning besides `reasoning_content`: the list, and the fields of its entries that are text.
_THOUGHTS = (("thinking_blocks", ("thinking",)), ("reasoning_details", ("text", "summary")))
_value = msgspec.json.Decoder()


def conversation(messages: Sequence[ChatMessage], most: int) -> tuple[Message, ...]:
    """Returns the messages of a body. Raises INVALID_ARGUMENT that names the message and its field."""
    if not messages:
        raise errors.invalid("messages", "must have at least one message")
    if len(messages) > most:
        raise errors.invalid("messages", f"must have at most {most} messages", len(messages))
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: ChatMessage, path: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise errors.invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}", message.role[:64])
    refuse_unsupported_in_message(message, path)
    content = _content(message, role, path)
    reasoning = _reasoning(message, path) if role is Role.ASSISTANT else ""
    if message.reasoning_content and role is not Role.ASSISTANT:
        raise errors.invalid(f"{path}.reasoning_content", "is only for the role assistant", message.role)
    calls = tuple(_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ()))
    known = Message(role, content, calls, message.tool_call_id or "", message.name or "", reasoning)
    known.validate(path)
    return known


def _content(message: ChatMessage, role: Role, path: str) -> str:
    content = message.content
    if content is None and role is not Role.ASSISTANT:
        raise errors.invalid(f"{path}.content", "must be a string or a list of text parts")
    if not isinstance(content, str):
        texts = (_text(part, role, f"{path}.content[{i}]") for i, part in enumerate(content or ()))
        content = "\n".join(text for text in texts if text is not None)
    if role is not Role.ASSISTANT:
        return content
    if refusal := _string(message.refusal, f"{path}.refusal"):
        content = f"{content}\n{refusal}" if content else refusal
    return content or _spoken(message, path)


def _spoken(message: ChatMessage, path: str) -> str:
    """Returns the transcript of an answer that was audio. Raises INVALID_ARGUMENT for one without."""
    audio = _decoded(message.audio, f"{path}.audio")
    if not audio:
        return ""
    if isinstance(audio, dict) and isinstance(transcript := audio.get("transcript"), str):
        return transcript
    raise errors.invalid(f"{path}.audio", "is not kept here: send the content or a transcript")


def _text(part: ContentPart, role: Role, path: str) -> str | None:
    """Returns the text of a part; None for one that is read elsewhere."""
    if role is Role.ASSISTANT and part.type in _THOUGHT_PARTS:
        return None
    text = part.refusal if part.type == "refusal" and role is Role.ASSISTANT else part.text
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        raise errors.invalid(f"{path}.type", "only text parts are supported", part.type[:64])
    if text is None:
        raise errors.invalid(f"{path}.{'refusal' if part.type == 'refusal' else 'text'}", "must be a string")
    return text


def _reasoning(message: ChatMessage, path: str) -> str:
    """Returns what the assistant thought, from the first field that has it: servers repeat it in several."""
    return next(filter(None, _thoughts(message, path)), "")


def _thoughts(message: ChatMessage, path: str) -> Iterator[str]:
    yield message.reasoning_content or ""
    yield _string(message.reasoning, f"{path}.reasoning")
    for name, fields in _THOUGHTS:
        yield _joined(_decoded(getattr(message, name), f"{path}.{name}"), fields)
    if isinstance(message.content, list):
        yield "".join(_thought(part, f"{path}.content") for part in message.content if part.type in _THOUGHT_PARTS)


def _thought(part: ContentPart, path: str) -> str:
    return part.text or _joined(_decoded(part.thinking, path), ("text",)) or _joined(_decoded(part.reasoning, path), ("text",))


def _joined(value: Any, fields: tuple[str, ...]) -> str:
    """Returns a text, or the texts of a list's entries."""
    if isinstance(value, str):
        return value
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    texts = (entry.get(name) for entry in entries for name in fields)
    return "".join(text for text in texts if isinstance(text, str))


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type not in ("function", None):
        raise errors.invalid(f"{path}.type", "only calls of functions are supported", call.type[:64])
    if call.function is None:
        raise errors.invalid(f"{path}.function", "is required")
    return ToolCall(call.id or "", call.function.name, _arguments(call.function.arguments, f"{path}.function.arguments"))


def _arguments(raw: Raw, field: str) -> str:
    """Returns the arguments as the model wrote them: some clients send them as an object."""
    value = bytes(raw or b"null")
    if value[:1] == b"{":
        _decoded(raw, field)
        return value.decode()
    if value[:1] == b'"' or value == b"null":
        return _string(raw, field)
    raise errors.invalid(field, "must be a string of JSON")


def _string(raw: Raw, field: str) -> str:
    """Returns the text of a field; empty for a field of another type, which is not this text."""
    value = _decoded(raw, field)
    return value if isinstance(value, str) else ""


def _decoded(raw: Raw, field: str) -> Any:
    try:
        return None if raw is None else _value.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.invalid(field, f"must be JSON: {error}"[:256]) from None
