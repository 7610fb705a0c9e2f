"""A conversation as a template gets it: the values that transformers' `apply_chat_template` passes.

All texts in it come from outside, down to the names in a function's arguments. The words that say
what a value is (roles, the type `function`) are ours, and so are the keys of messages and calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ryzanstein.generation.messages import Message, Role, ToolCall
from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.generation.template_options import template_variables
from ryzanstein.tools import Tool

Text = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Told:
    """The variables of a template: `messages`, `tools`, and those that the request sets.

    `tools` is None without any. With `continues` the text ends with the last message's content.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False

    @classmethod
    def of(cls, prompt: ChatPrompt) -> Told:
        template = prompt.template
        return cls(
            [_message(message) for message in prompt.messages],
            [_tool(tool) for tool in prompt.tools.offered] or None,
            variables=template_variables(template.variables),
            add_generation_prompt=template.add_generation_prompt,
            continues=template.continues,
        )

    def mapped(self, text: Text) -> Told:
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


def _message(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.is_plain:
        return told
    if message.tool_calls:
        # As clients send it: templates distinguish an empty answer from none.
        told["content"] = message.content or None
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    return told | dict(_others(message))


def _others(message: Message) -> Iterator[tuple[str, str]]:
    if message.role is Role.TOOL:
        yield "tool_call_id", message.tool_call_id
    if message.name:
        yield "name", message.name
    if message.reasoning:
        yield "reasoning_content", message.reasoning


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Any:
    """Returns the arguments as an object, or the text itself where the model wrote no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _mapped_tool(tool: dict[str, Any], text: Text) -> dict[str, Any]:
    return {"type": "function", "function": {key: mapped_tree(value, text) for key, value in tool["function"].items()}}


def _mapped_message(told: dict[str, Any], text: Text) -> dict[str, Any]:
    return {key: value if key == "role" else _mapped_part(key, value, text) for key, value in told.items()}


def _mapped_part(key: str, value: Any, text: Text) -> Any:
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
