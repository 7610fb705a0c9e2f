"""What a person asks: a text, or the results of tools that the assistant has called; and how it is to be answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ryzanstein.client import clean
from ryzanstein.client.requests import Options
from ryzanstein.console.wire import AskedCall, Sampling, ToolResult
from ryzanstein.v1 import inference_pb2 as pb

MOST_TOOLS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A text of a person, or results of tools: one of both."""

    text: str = ""
    results: tuple[ToolResult, ...] = ()

    @property
    def role(self) -> str:
        return "tool" if self.results else "user"

    @property
    def shown(self) -> str:
        """Returns it for people."""
        return "\n".join(f"{each.name}: {each.content}" for each in self.results) if self.results else self.text

    def says(self, other: Question) -> bool:
        """Returns whether both ask the same. The names of tools are for people: a result has the id of its call."""
        results = [(each.id, each.content) for each in self.results]
        return self.text == other.text and results == [(each.id, each.content) for each in other.results]

    def messages(self) -> list[pb.Message]:
        """Returns it as messages. Raises ValueError if there is nothing in it."""
        if not self.text and not self.results:
            raise ValueError("the question is empty")
        if not self.results:
            return [pb.Message(role=pb.ROLE_USER, content=self.text)]
        return [
            pb.Message(role=pb.ROLE_TOOL, tool_call_id=each.id, name=each.name, content=each.content) for each in self.results
        ]


def last_asked(messages: Sequence[pb.Message]) -> tuple[list[pb.Message], Question]:
    """Returns the last question of a conversation, and what came before it; an empty question: there is none."""
    before = list(messages)
    while before and before[-1].role not in (pb.ROLE_USER, pb.ROLE_TOOL):
        before.pop()
    results: list[ToolResult] = []
    while before and before[-1].role == pb.ROLE_TOOL:
        each = before.pop()
        results.insert(0, ToolResult(each.tool_call_id, each.name, each.content))
    if results:
        return before, Question(results=tuple(results))
    return before, Question(before.pop().content) if before else Question()


def options_of(session: str, sampling: Sampling) -> Options:
    """Returns the options of a request. Raises ValueError for tools that cannot be ones."""
    options: Options = {"session": session}
    if sampling.model:
        options["model"] = sampling.model
    if sampling.max_tokens is not None:
        options["max_tokens"] = sampling.max_tokens
    if sampling.temperature is not None:
        options["temperature"] = sampling.temperature
    if tools := tools_of(sampling.tools):
        options["tools"] = tools
        options["tool_choice"] = sampling.tool_choice
    return options


def tools_of(text: str) -> list[Mapping[str, Any]]:
    """Returns the tools that somebody wrote as JSON: a list as OpenAI has it, or one of them. Raises ValueError."""
    if not text.strip():
        return []
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tools are not JSON: {error}"[:200]) from None
    tools = given if isinstance(given, list) else [given]
    if len(tools) > MOST_TOOLS:
        raise ValueError(f"there are {len(tools)} tools, and at most {MOST_TOOLS} can be given")
    for number, tool in enumerate(tools, 1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {number} has no name: each is an object with name, description and parameters")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(f"tool {number}: its parameters must be a JSON schema, which is an object")
        if not isinstance(function.get("description") or "", str):
            raise ValueError(f"tool {number}: its description must be a text")
    return tools


def calls_of(calls: Iterable[pb.ToolCall]) -> list[AskedCall]:
    """Returns calls for the page."""
    return [AskedCall(each.id, clean(each.name), clean(each.arguments)) for each in calls]
