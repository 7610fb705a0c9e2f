"""How a conversation is told to a template: the first way that the template accepts and in which nothing is lost.

No value suits all templates. Some fail on a content that is null, others print the word; some loop
over the arguments of a call, others append them to a text; some read contents as text, others as
parts. What transformers passes is tried first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jinja2 import TemplateError

from ryzanstein.generation.prompts import ChatPrompt, Message
from ryzanstein.generation.tools import Tool
from ryzanstein.worker.text.templates.arrangements import arrangements, later_system, without_later_system
from ryzanstein.worker.text.templates.sandbox import OutputTooLong
from ryzanstein.worker.text.templates.template_input import Arguments, Empty, Form, TemplateInput, Tooling, content_text

Render = Callable[[TemplateInput], str]

_MARKS = range(0xF0000, 0xFFFFE)
_PARTS = ("{'type': 'text'", '{"type": "text"', '{"text": ')
"""How Python and JSON write a part."""
_SURELY = 16
"""A content of so many characters that is in the text comes from its message. A shorter one may be there by chance."""


class Unshown(Exception):
    """The template leaves a part of the messages out in each form, or refuses the message at `index`."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


@dataclass(frozen=True, slots=True)
class Chosen:
    """A conversation as the template is told it, and its text. `shows_tools`: all of them, if there are any, are in it."""

    given: TemplateInput
    text: str
    shows_tools: bool = True


def chosen(render: Render, prompt: ChatPrompt) -> Chosen:
    """Returns the first form in which the template shows all messages.

    Raises what `render` raises for the bounds, the template's own refusal, and Unshown.
    """
    failures: list[Exception] = []
    for given in _ways(prompt):
        try:
            return _checked(render, given)
        except (OutputTooLong, RecursionError, MemoryError):
            raise
        except Exception as error:  # a template is a program: whatever fails in it, fails on this form
            failures.append(error)
    raise _described_by(failures, render, prompt)


def _described_by(failures: Sequence[Exception], render: Render, prompt: ChatPrompt) -> Exception:
    """Returns what a client is told: the template's own words, before those of the program that it is."""
    own = [error for error in failures if type(error) is TemplateError]
    error = (own or failures)[0]
    index = later_system(prompt.messages)
    if index is None or isinstance(error, Unshown) or not _accepted(render, without_later_system(prompt)):
        return error
    return Unshown(index, f"the model's chat template refuses a system message here: {error}")


def _accepted(render: Render, prompt: ChatPrompt) -> bool:
    try:
        chosen(render, prompt)
    except Exception:
        return False
    return True


def _ways(prompt: ChatPrompt) -> Iterator[TemplateInput]:
    seen: list[TemplateInput] = []
    for messages in arrangements(prompt.messages):
        for form in _forms(messages, prompt.tools.offered):
            given = TemplateInput.of(replace(prompt, messages=messages), form)
            if given not in seen:
                seen.append(given)
                yield given


def _forms(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Form]:
    called = any(message.tool_calls for message in messages)
    arguments = list(Arguments) if called else [Arguments.OBJECTS]
    empties = list(Empty) if called else [Empty.ABSENT]
    for each, empty in product(arguments, empties):
        yield Form(empty, each)
    for each, empty in product(arguments, empties):
        if empty is not Empty.NULL:
            yield Form(empty, each, parts=True)
    for empty in empties:
        if not tools:
            yield Form(empty, tooling=Tooling.LISTED)
        elif not all(tool.parameters for tool in tools):
            yield Form(empty, tooling=Tooling.SPELLED)
        if any(message.reasoning for message in messages):
            yield Form(empty, thoughts=False)


def _checked(render: Render, given: TemplateInput) -> Chosen:
    text = render(given)
    if _prints_none(render, given, text):
        raise Unshown(_first_none(given), "the model's chat template prints a content that is not there")
    if any(isinstance(message.get("content"), list) for message in given.messages) and _prints_parts(given, text):
        raise Unshown(0, "the model's chat template prints the parts of a content instead of their text")
    for index, arguments in _raw_arguments(given):
        if not _is_in(arguments, text):
            raise Unshown(index, "the model's chat template leaves arguments of a call out that are no object")
    if not given.tools and not _calls(given) and _surely_visible(given, text):
        return Chosen(given, text)
    return _Marks(given, text).checked(render)


def _calls(given: TemplateInput) -> bool:
    return any(message.get("tool_calls") for message in given.messages)


def _prints_parts(given: TemplateInput, text: str) -> bool:
    return any(text.count(part) > sum(content_text(message).count(part) for message in given.messages) for part in _PARTS)


def _raw_arguments(given: TemplateInput) -> Iterator[tuple[int, str]]:
    """Yields the arguments that are told as texts, each with its message's index."""
    for index, message in enumerate(given.messages):
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                yield index, call["function"]["arguments"]


def _first_none(given: TemplateInput) -> int:
    return next(i for i, message in enumerate(given.messages) if _has_null(message))


def _has_null(message: dict[str, Any]) -> bool:
    return message.get("content", "") is None


def _prints_none(render: Render, given: TemplateInput, text: str) -> bool:
    """Returns whether the template writes `None` for a content that is null."""
    if "None" not in text or not any(map(_has_null, given.messages)):
        return False
    filled = [message | {"content": ""} if _has_null(message) else message for message in given.messages]
    try:
        return text.count("None") > render(replace(given, messages=filled)).count("None")
    except Exception:  # the template wants null
        return False


def _surely_visible(given: TemplateInput, text: str) -> bool:
    contents = Counter(content_text(message).strip() for message in given.messages)
    return all(not each or (len(each) >= _SURELY and text.count(each) >= num) for each, num in contents.items())


class _Marks:
    """Puts a mark, of a character that occurs nowhere else, into each content and each name of a function.

    A text is shown if its mark is in what the template writes.
    """

    def __init__(self, given: TemplateInput, text: str) -> None:
        used = set(text) | set().union(*given.texts())
        self._unused = (chr(code) for code in _MARKS if chr(code) not in used)
        self._given, self._text = given, text
        self._messages: list[list[str]] = [[] for _ in given.messages]
        self._tools: list[str] = []

    def checked(self, render: Render) -> Chosen:
        """Returns the form if all messages are shown. Raises Unshown."""
        marked = self._marked()
        try:
            text = render(marked)
        except (OutputTooLong, RecursionError, MemoryError):
            raise
        except Exception:  # the template looks into the texts, so it cannot be known
            return Chosen(self._given, self._text)
        for index, marks in enumerate(self._messages):
            if not all(_is_in(mark, text) for mark in marks):
                role = self._given.messages[index]["role"]
                raise Unshown(index, f"the model's chat template leaves a part of this message out (role {role})")
        return Chosen(self._given, self._text, all(_is_in(mark, text) for mark in self._tools))

    def _marked(self) -> TemplateInput:
        messages = [self._message(index, message) for index, message in enumerate(self._given.messages)]
        tools = None if self._given.tools is None else [self._tool(tool) for tool in self._given.tools]
        return replace(self._given, messages=messages, tools=tools)

    def _message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        found = dict(message)
        marks = self._messages[index]
        if content_text(message).strip():
            found["content"] = _with_text(message["content"], self._put(content_text(message), marks))
        if "tool_calls" in message:
            found["tool_calls"] = [self._call(call, marks) for call in message["tool_calls"]]
        return found

    def _call(self, call: dict[str, Any], marks: list[str]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "name": self._put(function["name"], marks)}}

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        return {**tool, "function": {**function, "name": self._put(function["name"], self._tools)}}

    def _put(self, text: str, marks: list[str]) -> str:
        """Returns the text with a mark in its middle and behind its last word; without, when none is left.

        The mark is twice the character: a template that loops over a text, taken for a list, writes each by itself.
        """
        mark = 2 * next(self._unused, "")
        if mark:
            marks.append(mark)
        words = text.rstrip()
        middle = len(words) // 2
        return f"{words[:middle]}{mark}{words[middle:]}{mark}{text[len(words) :]}"


def _with_text(content: Any, text: str) -> Any:
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def _is_in(some: str, text: str) -> bool:
    """Returns whether it is there, as it is or as JSON or Python write it."""
    return any(each in text for each in (some, _dumped(some), _dumped(some, ensure_ascii=True), repr(some)[1:-1]))


def _dumped(text: str, *, ensure_ascii: bool = False) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
