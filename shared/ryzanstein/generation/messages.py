"""Messages of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ryzanstein import errors
from ryzanstein.generation.names import check_label

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
