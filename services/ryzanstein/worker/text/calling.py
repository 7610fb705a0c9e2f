"""How a model calls functions: its family, as its chat template shows it, and what is said without one.

A template that knows no tools gets a generic form: a system message with the functions and how to
call them, calls and results as plain text. It says nothing that users' text could not say, so it
can forge no control token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ryzanstein.generation.prompts import ChatPrompt, Message, Role, ToolCall
from ryzanstein.generation.reply_format import THINK, ReplyStyle
from ryzanstein.generation.tools import NO_TOOLS, Tool, ToolMode, Tools
from ryzanstein.replies.calls.harmony import HARMONY_TOKENS
from ryzanstein.replies.families import MARKERS
from ryzanstein.replies.tags import HARMONY, TAGS
from ryzanstein.worker.text.templates.sandbox import reads

GENERIC = "generic"
ENFORCED = frozenset(
    {
        GENERIC,
        "hermes",
        "llama3",
        "mistral",
        "ministral",
        "deepseek",
        "granite",
        "cohere",
        "hunyuan",
        "lfm2",
        "olmo3",
        HARMONY,
    }
)
"""Families whose calls have a grammar here. The arguments of others are no JSON: a call that must be is a generic one."""
PYTHON = frozenset({"lfm2", "olmo3"})
"""Of those, families whose arguments are values by their names, so that these have to be known."""
_PLAIN_KEYS = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "$schema"})
# What only the template of a family has, the most telling first. `None`: a form that is not read
# here, so that the generic one is used instead.
_SIGNS: tuple[tuple[str, str | None], ...] = (
    ("<|channel|>", "harmony"),
    ("<seed:tool_call>", "seed"),
    ("<parameter=", "qwen_xml"),
    ("<function=", None),  # its arguments as one object
    ("<arg_key>", "glm"),
    ("<tool_calls>", "hunyuan"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("List of tools: [", "lfm2"),
    ("<function_calls>", "olmo3"),
    ("<|START_ACTION|>", "cohere"),
    ("[ARGS]", "ministral"),
    ("[TOOL_CALLS]", "mistral"),
    ("<\uff5ctool\u2581call", "deepseek"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ("Environment: ipython", "llama3"),
)
# The same of the tags around reasoning: all of these are in the template.
_TAG_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>analysis",), HARMONY),
    (("<seed:think>",), "seed"),
    (("<|START_THINKING|>",), "cohere"),
    (("<|channel>",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("<think>", "<response>"), "response"),
    (("<think>", "<answer>"), "answer"),
    (("<think>",), THINK),
    (("</think>",), THINK),
)


@dataclass(frozen=True, slots=True)
class Calling:
    """How one model calls functions and thinks.

    `native`: its template is given the tools. `thinking`: its reasoning stands between the `tags` of this name.
    """

    family: str = GENERIC
    native: bool = False
    thinking: bool = False
    tags: str = THINK

    @classmethod
    def of(cls, template: str, family: str = "auto", reasoning: str = "auto") -> Calling:
        """Returns what a template shows. `family` and `reasoning` are settings that override it."""
        found = next((name for sign, name in _SIGNS if sign in template), GENERIC)
        chosen = found if family == "auto" else family
        native = chosen is not None and reads(template, "tools")
        shown = next((name for signs, name in _TAG_SIGNS if all(sign in template for sign in signs)), "none")
        tags = shown if reasoning == "auto" else reasoning
        thinking = tags != "none"
        return cls(chosen if native and chosen is not None else GENERIC, native, thinking, tags if thinking else THINK)

    def generic(self) -> Calling:
        """Returns the same for a conversation whose tools the template does not show."""
        return replace(self, family=GENERIC, native=False)

    def described(self, prompt: ChatPrompt) -> ChatPrompt:
        """Returns the conversation as the template can show it."""
        offered = prompt.tools.offered if prompt.tools.mode is not ToolMode.NONE else ()
        if self.native:
            return replace(prompt, tools=replace(prompt.tools, offered=offered))
        messages = tuple(_joined(_plain(prompt.messages)))
        if offered:
            messages = _with_system(messages, instructions(prompt.tools))
        return replace(prompt, messages=messages, tools=NO_TOOLS)

    def style(self, prompt: ChatPrompt, text: str) -> ReplyStyle | None:
        """Returns how answers to the conversation with this text are read; None: as content alone."""
        calls = self.family if prompt.tools.callable else ""
        if prompt.tools.must and not enforceable(calls, prompt.tools):
            calls = GENERIC
        if not calls and not self.thinking:
            return None
        opened = self.tags in TAGS and text.rstrip().endswith(TAGS[self.tags].begin)
        return ReplyStyle(calls, self.thinking, self.thinking and opened, self.tags)

    def markers(self, prompt: ChatPrompt) -> tuple[str, ...]:
        """Returns the texts that tell calls and reasoning apart: they must be seen even where they are special tokens."""
        calls = MARKERS[self.family] if prompt.tools.callable else ()
        tags = TAGS[self.tags].texts if self.tags in TAGS else HARMONY_TOKENS
        return (*calls, *tags) if self.thinking else calls


def enforceable(family: str, tools: Tools) -> bool:
    """Returns whether a call of these functions has a grammar in the family's form."""
    return family in ENFORCED and (family not in PYTHON or all(_is_plain(tool.parameters) for tool in tools.callable))


def _is_plain(parameters: str) -> bool:
    """Returns whether a schema lists all arguments by names that Python has, and says nothing of several together."""
    if not parameters:
        return True
    schema = json.loads(parameters)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        schema.keys() <= _PLAIN_KEYS
        and isinstance(properties, dict)
        and isinstance(required, list)
        and set(required) <= properties.keys()
        and all(map(str.isidentifier, properties))
        and '"$ref"' not in parameters
    )


def has_calls(prompt: ChatPrompt) -> bool:
    """Returns whether there are calls or their results in the conversation."""
    return any(message.tool_calls or message.role is Role.TOOL for message in prompt.messages)


def instructions(tools: Tools) -> str:
    """Returns what a model without tools of its own is told."""
    lines = [
        "You can call functions. These are offered, each with the JSON schema of its arguments:",
        *map(_offer, tools.offered),
        "To call one, answer with nothing but",
        '<tool_call>{"name": "the function", "arguments": {}}</tool_call>',
    ]
    if tools.parallel:
        lines.append("once for each call.")
    if tools.mode is ToolMode.REQUIRED:
        lines.append("You must call a function now.")
    elif tools.mode is ToolMode.NAMED:
        lines.append(f"You must call {tools.named} now.")
    return "\n".join(lines)


def _offer(tool: Tool) -> str:
    schema = json.loads(tool.parameters) if tool.parameters else {}
    return json.dumps({"name": tool.name, "description": tool.description, "parameters": schema}, ensure_ascii=False)


def _with_system(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    if messages and messages[0].role is Role.SYSTEM:
        return (replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:])
    return (Message(Role.SYSTEM, text), *messages)


def _plain(messages: Sequence[Message]) -> Iterator[Message]:
    """Yields each message with its calls, or the call that it is the result of, as text."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role is Role.TOOL:
            name = names.get(message.tool_call_id, message.name or "the function")
            yield Message(Role.USER, f"<tool_response>{name}: {message.content}</tool_response>")
        elif message.tool_calls:
            yield Message(message.role, "\n".join(filter(None, (message.content, *map(_written, message.tool_calls)))))
        else:
            yield message


def _written(call: ToolCall) -> str:
    return f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}</tool_call>'


def _joined(messages: Iterator[Message]) -> Iterator[Message]:
    """Yields the messages, results one after the other as one: many templates demand that roles alternate."""
    before: Message | None = None
    for message in messages:
        if before is not None and _is_result(before) and message.role is Role.USER:
            before = replace(message, content=f"{before.content}\n{message.content}")
            continue
        if before is not None:
            yield before
        before = message
    if before is not None:
        yield before


def _is_result(message: Message) -> bool:
    return message.role is Role.USER and message.content.startswith("<tool_response>")
