"""A conversation as a template gets it: the values that transformers' `apply_chat_template` passes.

All texts in it come from outside, down to the names in a function's arguments. The words that say
what a value is (roles, the type `function`) are ours, and so are the keys of messages and calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall, template_variables
from ryzanstein.generation.tools import Tool

Text = Callable[[str], str]


class Arguments(Enum):
    """How the arguments of calls are told.

    `OBJECTS`: as objects, and what is none as it was written. `WRAPPED`: always as objects, for
    templates that look into them. `TEXTS`: as they were written, for templates that append them.
    """

    OBJECTS = "objects"
    WRAPPED = "wrapped"
    TEXTS = "texts"


class Empty(Enum):
    """What a message that has calls and no text has as its content: none (what transformers makes of null), null, or ''."""

    ABSENT = "absent"
    NULL = "null"
    TEXT = "text"


class Tooling(Enum):
    """How tools are told.

    `AS_SENT`: as they are, and `None` without any. `SPELLED`: a function without parameters has an empty object of
    them. `LISTED`: without any, an empty list, for templates that loop over it.
    """

    AS_SENT = "as sent"
    SPELLED = "spelled"
    LISTED = "listed"


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between templates: the content of a message that has calls and no text, and how texts are told.

    `parts`: a content is a list with a part of type `text`. `thoughts`: earlier reasoning is told.
    """

    empty: Empty = Empty.ABSENT
    arguments: Arguments = Arguments.OBJECTS
    parts: bool = False
    tooling: Tooling = Tooling.AS_SENT
    thoughts: bool = True


AS_SENT = Form()


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The variables of a template: `messages`, `tools`, and those that the request sets.

    `tools` is None without any. With `continues` the text ends with the last message's content.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False

    @classmethod
    def of(cls, prompt: ChatPrompt, form: Form = AS_SENT) -> TemplateInput:
        template = prompt.template
        return cls(
            [_message(message, form) for message in prompt.messages],
            _tools(prompt.tools.offered, form.tooling),
            variables=template_variables(template.variables),
            add_generation_prompt=template.add_generation_prompt,
            continues=template.continues,
        )

    def mapped(self, text: Text) -> TemplateInput:
        """Returns the same with each text from outside replaced by what `text` returns for it."""
        return replace(
            self,
            messages=[_mapped_message(message, text) for message in self.messages],
            tools=None if self.tools is None else [_mapped_tool(tool, text) for tool in self.tools],
            variables={name: mapped_tree(value, text) for name, value in self.variables.items()},
        )

    def texts(self) -> list[str]:
        """Returns the texts from outside."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        self.mapped(note)
        return found


def content_text(given: dict[str, Any]) -> str:
    """Returns the text of a message's content in any form."""
    content = given.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _message(message: Message, form: Form) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": message.content}] if form.parts else message.content
    given: dict[str, Any] = {"role": message.role.value, "content": content}
    if message.is_plain:
        return given
    if message.tool_calls:
        # Templates distinguish an empty answer from none.
        given = given if message.content else _without_text(given, form.empty)
        given["tool_calls"] = [_call(call, form.arguments) for call in message.tool_calls]
    return given | dict(_others(message, form))


def _without_text(given: dict[str, Any], empty: Empty) -> dict[str, Any]:
    if empty is Empty.ABSENT:
        return {key: value for key, value in given.items() if key != "content"}
    return given | {"content": None if empty is Empty.NULL else ""}


def _others(message: Message, form: Form) -> Iterator[tuple[str, str]]:
    if message.role is Role.TOOL:
        yield "tool_call_id", message.tool_call_id
    if message.name:
        yield "name", message.name
    if message.reasoning and form.thoughts:
        # Under all names that templates read: those of transformers, and what vLLM calls it.
        yield from ((name, message.reasoning) for name in ("thinking", "reasoning", "reasoning_content"))


def _call(call: ToolCall, arguments: Arguments) -> dict[str, Any]:
    given = arguments_of(call.arguments, arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": given}}


def arguments_of(text: str, form: Arguments) -> Any:
    """Returns the arguments as an object; where the model wrote none, the text itself or an object with it."""
    try:
        value = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        value = text
    if value is None:
        text, value = "{}", {}
    if form is Arguments.TEXTS:
        return text
    if isinstance(value, dict):
        return value
    return {"arguments": text} if form is Arguments.WRAPPED else text


def _tools(offered: Sequence[Tool], tooling: Tooling) -> list[dict[str, Any]] | None:
    if not offered:
        return [] if tooling is Tooling.LISTED else None
    return [_tool(tool, spelled=tooling is Tooling.SPELLED) for tool in offered]


def _tool(tool: Tool, *, spelled: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    elif spelled:
        function["parameters"] = {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _mapped_tool(tool: dict[str, Any], text: Text) -> dict[str, Any]:
    return {"type": "function", "function": {key: mapped_tree(value, text) for key, value in tool["function"].items()}}


def _mapped_message(given: dict[str, Any], text: Text) -> dict[str, Any]:
    return {key: value if key == "role" else _mapped_part(key, value, text) for key, value in given.items()}


def _mapped_part(key: str, value: Any, text: Text) -> Any:
    if key == "content" and isinstance(value, list):
        return [part | {"text": text(part["text"])} for part in value]
    return [_mapped_call(call, text) for call in value] if key == "tool_calls" else mapped_tree(value, text)


def _mapped_call(call: dict[str, Any], text: Text) -> dict[str, Any]:
    function = {key: mapped_tree(value, text) for key, value in call["function"].items()}
    return {"id": text(call["id"]), "type": "function", "function": function}


def mapped_tree(value: Any, text: Text) -> Any:
    """Returns a JSON value with each of its strings, keys included, replaced."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(key): mapped_tree(each, text) for key, each in value.items()}
    if isinstance(value, list):
        return [mapped_tree(each, text) for each in value]
    return value
