"""The functions that a request offers to the assistant, and whether it must call one. Standard library only."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from ryzanstein import errors

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 262_144
MAX_DEPTH = 64
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
"""A step down, and as a signed byte a step up."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class ToolMode(Enum):
    """Whether the assistant calls functions, as OpenAI's `tool_choice` spells it."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "function"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `parameters` is a JSON schema of its arguments, as JSON; empty: it has none."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False

    @property
    def num_chars(self) -> int:
        return len(self.name) + len(self.description) + len(self.parameters)


@dataclass(frozen=True, slots=True)
class Tools:
    """What may be called. `named` is the function that must be, with `ToolMode.NAMED`.

    Without `parallel` an answer has at most one call.
    """

    offered: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.AUTO
    named: str = ""
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The functions that the assistant may call in its answer."""
        if self.mode is ToolMode.NONE:
            return ()
        return self.offered if self.mode is not ToolMode.NAMED else tuple(t for t in self.offered if t.name == self.named)

    @property
    def must(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)

    @property
    def num_chars(self) -> int:
        return sum(tool.num_chars for tool in self.offered)

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the field."""
        if len(self.offered) > MAX_TOOLS:
            raise errors.invalid("tools", f"must have at most {MAX_TOOLS} tools", len(self.offered))
        if self.num_chars > MAX_TOOLS_CHARS:
            raise errors.invalid("tools", f"must have at most {MAX_TOOLS_CHARS} characters in total", self.num_chars)
        names: set[str] = set()
        for i, tool in enumerate(self.offered):
            valid_function_name(tool.name, f"tools[{i}].function.name")
            if tool.name in names:
                raise errors.invalid(f"tools[{i}].function.name", "must differ from those of the other tools", tool.name)
            names.add(tool.name)
            _check_schema(tool.parameters, f"tools[{i}].function.parameters")
        self._validate_choice(names)

    def _validate_choice(self, names: set[str]) -> None:
        if self.must and not self.offered:
            raise errors.invalid("tool_choice", "requires tools")
        if self.mode is ToolMode.NAMED and self.named not in names:
            raise errors.invalid("tool_choice.function.name", "must be one of the tools", self.named[:64])


NO_TOOLS = Tools()


def valid_function_name(name: str, field: str) -> str:
    """Returns the name of a function. Raises INVALID_ARGUMENT, which names the field."""
    if not _FUNCTION.fullmatch(name):
        raise errors.invalid(field, "must have 1 to 64 letters, digits, underscores, dots and dashes", name[:64])
    return name


def _check_schema(text: str, field: str) -> None:
    if not text:
        return
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.invalid(field, f"must be JSON: {error}"[:256]) from None
    if not isinstance(schema, dict):
        raise errors.invalid(field, "must be an object")
    if _depth(text) > MAX_DEPTH:
        raise errors.invalid(field, f"must be nested at most {MAX_DEPTH} levels deep")


def _depth(text: str) -> int:
    """Returns how deeply objects and lists of this JSON are nested.

    Counting brackets is faster than a walk over 80,000 lists, for which the event loop has no time.
    """
    steps = _STRING.sub("", text).encode().translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(array("b", steps)), default=0)
