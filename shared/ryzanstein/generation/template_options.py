"""What a chat template is given besides the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein import errors

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
