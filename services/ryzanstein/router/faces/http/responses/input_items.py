"""The input of a response: items, and the messages that they make."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ryzanstein import errors
from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.router.faces.openai.requests.schemas import ContentPart

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
# What OpenAI's servers did on their own: these items have no text of the conversation.
_SILENT = frozenset({"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"})


class InputItem(msgspec.Struct, frozen=True):
    """One item of the input: a message, a call that the model made, or what it returned.

    Fields of other kinds, and what a client repeats of an item that it received, are skipped.
    """

    type: str = "message"
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None

    @property
    def refers(self) -> bool:
        """Whether it stands for an item of a kept response. OpenAI lets its type be left out."""
        bare = self.type == "message" and self.role is None and self.content is None
        return bool(self.id) and (bare or self.type == "item_reference")


def spoken_in(given: str | Sequence[InputItem], most: int) -> tuple[Message, ...]:
    """Returns the messages of an input. Raises INVALID_ARGUMENT that names the item and its field."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise errors.invalid("input", "must have at least one item")
    if len(given) > most:
        raise errors.invalid("input", f"must have at most {most} items", len(given))
    wording = _Spoken()
    for i, item in enumerate(given):
        wording.add(item, f"input[{i}]")
    if not wording.messages:
        raise errors.invalid("input", "must have at least one message")
    return tuple(wording.messages)


class _Spoken:
    """Collects messages. An assistant's message has the calls behind it and the reasoning before it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thought = ""

    def add(self, item: InputItem, path: str) -> None:
        match item.type:
            case "message":
                self._say(item, path)
            case "function_call":
                self._call(ToolCall(item.call_id or "", item.name or "", item.arguments or ""), path)
            case "custom_tool_call":
                arguments = json.dumps({"input": item.input or ""}, ensure_ascii=False)
                self._call(ToolCall(item.call_id or "", item.name or "", arguments), path)
            case "function_call_output" | "custom_tool_call_output":
                message = Message(Role.TOOL, _text(item.output, f"{path}.output"), tool_call_id=item.call_id or "")
                message.validate(path)
                self.messages.append(message)
            case "reasoning":  # the template decides whether the model sees it again
                self._thought = "".join(part.text or "" for part in item.content or () if isinstance(part, ContentPart))
            case silent if silent in _SILENT:
                pass
            case _:
                raise errors.invalid(f"{path}.type", "is not supported", item.type[:64])

    def _say(self, item: InputItem, path: str) -> None:
        role = _ROLES.get(item.role or "")
        if role is None:
            raise errors.invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}", (item.role or "")[:64])
        content = _text(item.content, f"{path}.content")
        self.messages.append(Message(role, content, reasoning=self._reasoning() if role is Role.ASSISTANT else ""))

    def _call(self, call: ToolCall, path: str) -> None:
        """Adds a call to the assistant's message before it, or as a message of its own."""
        before = (
            self.messages.pop() if self.messages and self.messages[-1].role is Role.ASSISTANT else Message(Role.ASSISTANT, "")
        )
        thought = before.reasoning + self._reasoning()
        message = Message(Role.ASSISTANT, before.content, (*before.tool_calls, call), reasoning=thought)
        message.validate(path)
        self.messages.append(message)

    def _reasoning(self) -> str:
        thought, self._thought = self._thought, ""
        return thought


def _text(content: str | Sequence[ContentPart] | None, path: str) -> str:
    if content is None:
        raise errors.invalid(path, "must be a string or a list of text parts")
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        raise errors.invalid(f"{path}.type", "only text parts are supported", part.type[:64])
    if text is None:
        raise errors.invalid(f"{path}.text", "must be a string")
    return text


def items_spoken(generation_id: str, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns messages as input items, each with an id that stays the same."""
    items = [item for message in messages for item in _items(message)]
    return [
        {"id": f"{_PREFIXES[item['type']]}_{generation_id}_in{i}", **item, "status": "completed"}
        for i, item in enumerate(items)
    ]


_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}
        return
    if message.reasoning:
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": message.reasoning}]}
    if message.content or not message.tool_calls:
        own: dict[str, Any] = {"annotations": [], "logprobs": []} if message.role is Role.ASSISTANT else {}
        kind = "output_text" if own else "input_text"
        yield {"type": "message", "role": message.role.value, "content": [{"type": kind, "text": message.content, **own}]}
    for call in message.tool_calls:
        yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
