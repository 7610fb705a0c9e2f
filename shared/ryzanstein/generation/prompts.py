"""What is answered: messages of a conversation, a text or tokens, and what a chat template is given besides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any

from ryzanstein import errors
from ryzanstein.generation.tools import NO_TOOLS, Tools

MAX_NAME_CHARS = 128
MAX_LABEL_BYTES = 16_384
"""Of a label that others chose and that means nothing here: the id of a call, the name of an author."""
VISIBLE = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII characters."""
TENANT_ID = "x-tenant-id"
"""The HTTP header and the gRPC metadata key that name the tenant."""


def name_fault(name: str) -> str:
    """Returns what is wrong with a name of a model, as the end of a sentence; empty: nothing."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters, got {len(name)}"
    return "" if name.isprintable() else "has characters that cannot be printed"


def check_label(label: str, field: str) -> None:
    """Raises INVALID_ARGUMENT for a label that is too long."""
    if len(label) > MAX_LABEL_BYTES or (not label.isascii() and len(label.encode(errors="replace")) > MAX_LABEL_BYTES):
        raise errors.invalid(field, f"must have at most {MAX_LABEL_BYTES} bytes", label[:64])


def user_key(label: str, field: str) -> str:
    """Returns the key of a user: the label that the client gave, or a digest of one that is too long to be a key.

    Raises INVALID_ARGUMENT for a label that is longer than a label may be.
    """
    check_label(label, field)
    if len(label) <= MAX_NAME_CHARS:
        return label
    return f"blake2b:{blake2b(label.encode(errors='replace'), digest_size=16).hexdigest()}"


def valid_tenant(given: str, user: str) -> str:
    """Returns who is charged: the tenant that the caller's gateway names, else the user.

    Raises INVALID_ARGUMENT for a tenant name of over 128 characters or with other characters than
    visible ASCII.
    """
    if not given:
        return user
    if len(given) > MAX_NAME_CHARS or not VISIBLE.fullmatch(given):
        raise errors.invalid(TENANT_ID, f"must have 1 to {MAX_NAME_CHARS} visible ASCII characters", given[:64])
    return given


MAX_TEMPLATE_VARIABLES_CHARS = 4096
MAX_TEMPLATE_VARIABLES_DEPTH = 100


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template is given besides the messages.

    `variables` is a JSON object, or empty. With `continues` the last message is the beginning of
    the answer.
    """

    variables: str = ""
    add_generation_prompt: bool = True
    continues: bool = False

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the field."""
        if self.variables:
            template_variables(self.variables)
        if self.continues and self.add_generation_prompt:
            raise errors.invalid("continue_final_message", "requires add_generation_prompt: false", True)


PLAIN_TEMPLATE = TemplateOptions()
_TEMPLATES_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


def template_variables(text: str) -> dict[str, Any]:
    """Returns the variables of a chat template. Raises INVALID_ARGUMENT for anything but their JSON."""
    field = "chat_template_kwargs"
    if len(text) > MAX_TEMPLATE_VARIABLES_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_TEMPLATE_VARIABLES_CHARS} characters of JSON", len(text))
    try:
        variables = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        raise errors.invalid(field, "must be a JSON object") from None
    if not isinstance(variables, dict):
        raise errors.invalid(field, "must be a JSON object")
    if _depth(variables) > MAX_TEMPLATE_VARIABLES_DEPTH:  # how deep a parser goes depends on the version of Python
        raise errors.invalid(field, f"must be nested at most {MAX_TEMPLATE_VARIABLES_DEPTH} levels deep")
    for name in variables:
        if not name.isidentifier() or name in _TEMPLATES_OWN:
            raise errors.invalid(f"{field}.{name[:64]}", "is not a variable that a request may set")
    return variables


def _depth(value: Any) -> int:
    """Returns how many lists and objects are within each other at most."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def with_variables(text: str, added: Mapping[str, str | bool]) -> str:
    """Returns the variables with those of the others that they lack. Raises as `template_variables`."""
    known = template_variables(text)
    return json.dumps(known | {name: value for name, value in added.items() if name not in known}, separators=(",", ":"))


MAX_TOOL_CALLS = 128


class Role(Enum):
    """The author of a message, as chat templates spell it."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. `arguments` is JSON as the model wrote it; it may be incomplete."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    `tool_calls` and `reasoning` are the assistant's. `tool_call_id` names the call of which a
    tool's message is the result. `name` tells authors of one role apart. Ids and names are labels
    that clients, models and other servers chose: any text, also none. `validate` enforces this, and
    the bounds of `Message` in inference.proto.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether it has only what messages of every version have: a content, and a role but a tool's."""
        return self.role is not Role.TOOL and not (self.tool_calls or self.tool_call_id or self.name or self.reasoning)

    @property
    def num_chars(self) -> int:
        """The characters of all its texts."""
        if self.is_plain:
            return len(self.content)
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.tool_call_id) + len(self.name) + len(self.reasoning) + calls

    def validate(self, field: str) -> None:
        """Raises INVALID_ARGUMENT, which names the first part of the message at `field` that is wrong."""
        if self.is_plain:
            return
        for part, role in (("tool_calls", Role.ASSISTANT), ("reasoning", Role.ASSISTANT), ("tool_call_id", Role.TOOL)):
            if getattr(self, part) and self.role is not role:
                raise errors.invalid(f"{field}.{part}", f"is only for the role {role.value}", self.role.value)
        check_label(self.tool_call_id, f"{field}.tool_call_id")
        check_label(self.name, f"{field}.name")
        if len(self.tool_calls) > MAX_TOOL_CALLS:
            raise errors.invalid(f"{field}.tool_calls", f"must have at most {MAX_TOOL_CALLS} calls", len(self.tool_calls))
        for i, call in enumerate(self.tool_calls):
            check_label(call.id, f"{field}.tool_calls[{i}].id")
            check_label(call.name, f"{field}.tool_calls[{i}].function.name")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to which the node applies its chat template, and what the assistant may call."""

    messages: tuple[Message, ...]
    template: TemplateOptions = PLAIN_TEMPLATE
    tools: Tools = NO_TOOLS

    @property
    def is_plain(self) -> bool:
        """Whether it has only what prompts of every version have."""
        return self.tools == NO_TOOLS and all(message.is_plain for message in self.messages)

    @property
    def num_chars(self) -> int:
        return sum(message.num_chars for message in self.messages) + self.tools.num_chars


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text that is continued as is; with a `suffix` up to what stands after the answer.

    A router has the latter made of the model's own tokens before anything is generated.
    """

    text: str
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A tokenized text that is continued as is."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def has_middle(prompt: Prompt) -> bool:
    """Returns whether the answer goes between two texts."""
    return isinstance(prompt, TextPrompt) and prompt.suffix is not None
