"""What an answer has to look like besides being the same as without a fault: an object, or calls.

It is judged by jsonschema, which shares nothing with what enforces the form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema

from ryzanstein.lab.clients.reading import ChoiceRead

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """The content is JSON that a schema admits."""

    schema: Schema

    def flaw(self, choice: ChoiceRead) -> str:
        """Returns what is wrong with a finished choice, empty if nothing is."""
        return "calls beside the object" if choice.calls else _flaw(choice.text, self.schema)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The answer is calls of these functions, which are schemas by name.

    `named` is the function that the client demands; empty: any of them.
    """

    functions: Mapping[str, Schema]
    named: str = ""

    def flaw(self, choice: ChoiceRead) -> str:
        """See `ObjectForm.flaw`."""
        if not choice.calls or choice.text:
            return f"{len(choice.calls)} calls beside {choice.text[:40]!r}"
        if sorted(choice.calls) != list(range(len(choice.calls))):
            return f"calls {sorted(choice.calls)}"
        flaws = (self._flaw_of(call.name, call.arguments) for call in choice.calls.values())
        return next(filter(None, flaws), "")

    def _flaw_of(self, name: str, arguments: str) -> str:
        if name not in ([self.named] if self.named else self.functions):
            return f"a call of {name!r}"
        return _flaw(arguments, self.functions[name])


AnswerForm = ObjectForm | CallForm


def _flaw(text: str, schema: Schema) -> str:
    try:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    except ValueError as wrong:
        return f"no JSON: {wrong}"
    except jsonschema.ValidationError as wrong:
        return f"{wrong.json_path}: {wrong.message[:80]}"
    return ""
