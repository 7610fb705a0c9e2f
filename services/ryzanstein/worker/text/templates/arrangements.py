"""Other arrangements of the same messages, for templates that refuse the one that was sent, or leave a part of it out.

Agents send instructions in the middle of a conversation and call several functions at once. Many
templates take a system message only at the beginning, or one call in a message. Some leave calls out:
these expect what the model wrote as text, markers included. A marker is control text, which no message
may have, so a character that occurs nowhere stands for it until the template has run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall
from ryzanstein.worker.text.templates.template_input import Arguments, TemplateInput, arguments_of

Messages = tuple[Message, ...]
_BEGIN, _END = "\uf8fe", "\uf8ff"


def arrangements(messages: Messages) -> Iterator[Messages]:
    """Yields the messages as they are, then those other orders of them that differ. No text is left out."""
    systems = _distinct([messages, _in_turns(messages), _system_first(messages)])
    alternating = _alternating(_in_turns(messages))
    yield from _distinct([*systems, *map(_one_by_one, systems), alternating, _alternating(_without_system(alternating))])


def later_system(messages: Sequence[Message]) -> int | None:
    """Returns the index of the first system message that is not the first message."""
    return next((i for i, message in enumerate(messages) if i and message.role is Role.SYSTEM), None)


def without_later_system(prompt: ChatPrompt) -> ChatPrompt:
    """Returns the conversation without the system messages that are not the first message."""
    kept = tuple(message for i, message in enumerate(prompt.messages) if not i or message.role is not Role.SYSTEM)
    return replace(prompt, messages=kept)


def _distinct(orders: Sequence[Messages]) -> list[Messages]:
    return [order for i, order in enumerate(orders) if order not in orders[:i]]


def _in_turns(messages: Messages) -> Messages:
    """Returns the system messages at the beginning as one, and each later one with the user's message beside it."""
    found: list[Message] = []
    waiting = ""
    for message in messages:
        if message.role is Role.SYSTEM and (not found or found[-1].role is Role.SYSTEM):
            found = [_after(found[-1], message.content) if found else message]
        elif message.role is Role.SYSTEM:
            waiting = _joined(waiting, message.content)
        else:
            if waiting and message.role is not Role.USER:
                _spoken_by_user(found, waiting)
                waiting = ""
            found.append(replace(message, content=_joined(waiting, message.content)))
            waiting = ""
    if waiting:
        _spoken_by_user(found, waiting)
    return tuple(found)


def _spoken_by_user(found: list[Message], text: str) -> None:
    """Adds a text to the user's message that is last, or as one: roles alternate."""
    if found[-1].role is Role.USER:
        found[-1] = _after(found[-1], text)
    else:
        found.append(Message(Role.USER, text))


def _system_first(messages: Messages) -> Messages:
    """Returns all system messages as one at the beginning."""
    systems = [message for message in messages if message.role is Role.SYSTEM]
    if not systems:
        return messages
    first = replace(systems[0], content="\n\n".join(message.content for message in systems))
    return (first, *(message for message in messages if message.role is not Role.SYSTEM))


def _without_system(messages: Messages) -> Messages:
    """Returns the system message at the beginning as a user's, for templates that know no such role."""
    if not messages or messages[0].role is not Role.SYSTEM:
        return messages
    return (replace(messages[0], role=Role.USER), *messages[1:])


def _alternating(messages: Messages) -> Messages:
    """Returns neighbours that one side said, without calls, as one message."""
    found: list[Message] = []
    for message in messages:
        if found and _is_more(found[-1], message):
            found[-1] = _after(found[-1], message.content)
        else:
            found.append(message)
    return tuple(found)


def _is_more(before: Message, message: Message) -> bool:
    wording = before.role is message.role and message.role in (Role.USER, Role.ASSISTANT)
    return wording and before.name == message.name and not (before.tool_calls or message.tool_calls or message.reasoning)


def _after(message: Message, text: str) -> Message:
    return replace(message, content=_joined(message.content, text))


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _one_by_one(messages: Messages) -> Messages:
    """Returns each call as a message of its own, before its result, and what was said beside it before that."""
    found: list[Message] = []
    results: list[Message] = []
    calls: list[ToolCall] = []
    reasoning = ""
    for message in messages:
        if message.role is Role.TOOL and calls:
            results.append(message)
            continue
        found += _pairs(calls, results, reasoning)
        calls, results, reasoning = [], [], ""
        if message.role is Role.ASSISTANT and message.tool_calls:
            calls = list(message.tool_calls)
            if message.content.strip():
                found.append(replace(message, tool_calls=()))
            else:
                reasoning = message.reasoning
        else:
            found.append(message)
    return (*found, *_pairs(calls, results, reasoning))


def _pairs(calls: Sequence[ToolCall], results: list[Message], reasoning: str) -> Iterator[Message]:
    """Yields each call with its result, the first with the reasoning; results of other calls come last."""
    left = list(results)
    for i, call in enumerate(calls):
        yield Message(Role.ASSISTANT, "", (call,), reasoning="" if i else reasoning)
        own = [result for result in left if result.tool_call_id == call.id]
        left = [result for result in left if result.tool_call_id != call.id]
        yield from own
    yield from left


def written(prompt: ChatPrompt, family: str) -> ChatPrompt | None:
    """Returns the conversation with its calls as text; None: it has none, or its family is not written here."""
    if family not in _AS_TEXT or not any(message.tool_calls for message in prompt.messages):
        return None
    if any(mark in text for text in TemplateInput.of(prompt).texts() for mark in (_BEGIN, _END)):
        return None
    return replace(prompt, messages=tuple(_in_text(message, family) for message in prompt.messages))


def marked(render: Callable[[TemplateInput], str], family: str) -> Callable[[TemplateInput], str]:
    """Returns the same with the family's markers in the text, where characters stand for them."""
    begin, end, _ = _AS_TEXT[family]
    return lambda given: render(given).replace(_BEGIN, begin).replace(_END, end)


def _in_text(message: Message, family: str) -> Message:
    if not message.tool_calls:
        return message
    calls = _AS_TEXT[family][2](message.tool_calls)
    return replace(message, content=f"{message.content}{_BEGIN}{calls}{_END}", tool_calls=())


def _python(calls: Sequence[ToolCall]) -> str:
    return f"[{', '.join(f'{call.name}({_members(_arguments(call))})' for call in calls)}]"


def _members(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in arguments.items())


def _literal(value: Any) -> str:
    """Returns a JSON value as Python writes it, its texts in double quotation marks."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_dumped(name)}: {_literal(each)}' for name, each in value.items())}}}"
    return repr(value) if value is None or isinstance(value, bool) else _dumped(value)


def _objects(calls: Sequence[ToolCall]) -> str:
    return _dumped([{"name": call.name, "arguments": _arguments(call)} for call in calls])


def _arguments(call: ToolCall) -> dict[str, Any]:
    given: dict[str, Any] = arguments_of(call.arguments, Arguments.WRAPPED)
    return given


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_AS_TEXT: Mapping[str, tuple[str, str, Callable[[Sequence[ToolCall]], str]]] = MappingProxyType(
    {
        "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>", _python),
        "granite": ("<|tool_call|>", "", _objects),
    }
)
