"""The formats of training data, as objects say which one they are: chats, Alpaca's, prompts with completions, texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import Message, Role, ToolCall
from ryzanstein.generation.tools import NO_TOOLS, Tool, Tools
from ryzanstein.worker.refusal import excerpt


class Unfit(Exception):
    """An object that is no example of its format. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `learned` are the indices of the assistant's messages on which is trained."""

    messages: tuple[Message, ...]
    tools: Tools
    learned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text that is continued. Without a prompt all of it is learned."""

    prompt: str
    completion: str


Item = Chat | Continuation


@dataclass(frozen=True, slots=True)
class DataFormat:
    """A format: the keys that an object must have and may have, and what makes an example of it."""

    name: str
    required: frozenset[str]
    optional: frozenset[str]
    item: Callable[[dict[str, Any]], Item]


def format_of(value: Mapping[str, Any]) -> DataFormat:
    """Returns the format of a file, by the keys of its first object. Raises Unfit."""
    for each in FORMATS:
        if each.required <= value.keys():
            return each
    known = "; ".join(f"{each.name}: {', '.join(sorted(each.required))}" for each in FORMATS)
    raise Unfit(f"has the keys {excerpt(sorted(value))}, of no known format ({known})")


def item_of(value: dict[str, Any], form: DataFormat) -> Item:
    """Returns the example in an object. Raises Unfit."""
    if lacking := sorted(form.required - value.keys()):
        raise Unfit(f"lacks {', '.join(lacking)}, which the first one has ({form.name})")
    if unknown := sorted(value.keys() - form.required - form.optional):
        raise Unfit(f"has the unknown key {excerpt(unknown[0])} ({form.name})")
    return form.item(value)


def _chat(value: dict[str, Any]) -> Chat:
    messages = _messages(value["messages"])
    weights = [_weight(given, f"messages[{i}]") for i, given in enumerate(value["messages"])]
    if value.get("parallel_tool_calls") not in (None, True, False):
        raise Unfit("parallel_tool_calls must be true or false")
    learned = [i for i, message in enumerate(messages) if message.role is Role.ASSISTANT and weights[i]]
    if not learned:
        raise Unfit("has no assistant message to learn from")
    for index in learned:
        _refuse_empty(messages[index], f"messages[{index}]")
    return Chat(messages, _tools(value.get("tools")), tuple(learned))


def _refuse_empty(message: Message, field: str) -> None:
    if not message.content.strip() and not message.tool_calls:
        raise Unfit(f"{field}: an assistant's message without content or calls: there is nothing to learn from")


def _alpaca(value: dict[str, Any]) -> Chat:
    instruction, given, output = (_text(value.get(key) or "", key) for key in ("instruction", "input", "output"))
    if not instruction.strip():
        raise Unfit("instruction is empty")
    if not output.strip():
        raise Unfit("output is empty: there is nothing to learn from")
    asked = Message(Role.USER, "\n\n".join(filter(str.strip, (instruction, given))))
    system = _text(value.get("system") or "", "system")
    before = (Message(Role.SYSTEM, system),) if system.strip() else ()
    return Chat((*before, asked, Message(Role.ASSISTANT, output)), NO_TOOLS, (len(before) + 1,))


def _completion(value: dict[str, Any]) -> Item:
    if isinstance(value["prompt"], list) and isinstance(value["completion"], list):
        both = _chat({"messages": [*value["prompt"], *value["completion"]]})
        return Chat(both.messages, both.tools, tuple(i for i in both.learned if i >= len(value["prompt"])))
    prompt, completion = (_text(value[key], key) for key in ("prompt", "completion"))
    if not completion:
        raise Unfit("completion is empty: there is nothing to learn from")
    return Continuation(prompt, completion)


def _plain(value: dict[str, Any]) -> Continuation:
    text = _text(value["text"], "text")
    if not text.strip():
        raise Unfit("text is empty: there is nothing to learn from")
    return Continuation("", text)


FORMATS = (
    DataFormat("chat", frozenset({"messages"}), frozenset({"tools", "parallel_tool_calls"}), _chat),
    DataFormat("alpaca", frozenset({"instruction", "output"}), frozenset({"input", "system"}), _alpaca),
    DataFormat("prompt/completion", frozenset({"prompt", "completion"}), frozenset(), _completion),
    DataFormat("text", frozenset({"text"}), frozenset(), _plain),
)

_ROLES: Mapping[str, Role] = MappingProxyType({role.value: role for role in Role} | {"developer": Role.SYSTEM})
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "weight", "refusal", *_REASONING})


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise Unfit(f"messages must be a list with messages, got {excerpt(given)}")
    return tuple(_message(each, f"messages[{i}]") for i, each in enumerate(given))


def _message(given: Any, field: str) -> Message:
    if not isinstance(given, dict):
        raise Unfit(f"{field} must be an object, got {excerpt(given)}")
    unknown = sorted(key for key, value in given.items() if key not in _KEYS and value is not None)
    if unknown:
        raise Unfit(f"{field} has the unknown key {excerpt(unknown[0])}")
    role = _ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        raise Unfit(f"{field}.role must be one of {', '.join(_ROLES)}, got {excerpt(given.get('role'))}")
    if given.get("refusal"):
        raise Unfit(f"{field}.refusal is not supported: write it as content")
    texts = {key: _text(given.get(key) or "", f"{field}.{key}") for key in ("tool_call_id", "name")}
    reasoning = next((given[key] for key in _REASONING if given.get(key)), "")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Unfit(f"{field}.tool_calls must be a list")
    message = Message(
        role,
        _content(given.get("content"), f"{field}.content"),
        tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)),
        reasoning=_text(reasoning, f"{field}.{_REASONING[0]}"),
        **texts,
    )
    _checked(lambda: message.validate(field))
    return message


def _content(given: Any, field: str) -> str:
    if given is None:
        return ""
    if not isinstance(given, list):
        return _text(given, field)
    for i, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Unfit(f"{field}[{i}] must be a part of type text, got {excerpt(part)}")
    return "".join(part["text"] for part in given)


def _call(given: Any, field: str) -> ToolCall:
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        raise Unfit(f"{field} must be a call of a function, got {excerpt(given)}")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = _text(function.get("name"), f"{field}.function.name")
    return ToolCall(_text(given.get("id") or "", f"{field}.id"), name, arguments)


def _tools(given: Any) -> Tools:
    if given is None or given == []:
        return NO_TOOLS
    if not isinstance(given, list):
        raise Unfit(f"tools must be a list, got {excerpt(given)}")
    tools = Tools(tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(given)))
    _checked(tools.validate)
    return tools


def _tool(given: Any, field: str) -> Tool:
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict) or given.get("type", "function") != "function":
        raise Unfit(f"{field} must be a function, got {excerpt(given)}")
    parameters = function.get("parameters")
    described = "" if parameters is None else json.dumps(parameters, ensure_ascii=False)
    description = _text(function.get("description") or "", f"{field}.function.description")
    name = _text(function.get("name"), f"{field}.function.name")
    return Tool(name, description, described, strict=function.get("strict") is True)


def _weight(given: dict[str, Any], field: str) -> bool:
    """Returns whether a message is learned: `weight` as OpenAI has it, 0 or 1."""
    weight = given.get("weight")
    if weight not in (None, 0, 1) or isinstance(weight, bool):
        raise Unfit(f"{field}.weight must be 0 or 1, got {excerpt(weight)}")
    return weight != 0


def _text(given: Any, field: str) -> str:
    if not isinstance(given, str):
        raise Unfit(f"{field} must be a text, got {excerpt(given)}")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise Unfit(f"{field} has half of a surrogate pair, which is no character") from None
    if "\0" in given:
        raise Unfit(f"{field} has a NUL character")
    return given


def _checked(check: Callable[[], None]) -> None:
    try:
        check()
    except RyzansteinError as error:
        raise Unfit(str(error)) from error
