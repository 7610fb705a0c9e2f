"""What an answer must look like: a JSON object, a schema, a regular expression, a choice, a grammar.

A frozen value that travels with the sampling parameters. Whether it can be enforced is found where
it is compiled, on the node; here only sizes are checked. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ryzanstein import errors

MAX_CONSTRAINT_BYTES = 128 * 2**10
MAX_ALTERNATIVES = 1024
MAX_AFTER_CHARS = 64
FIELD = "sampling.constraint"


class ConstraintKind(Enum):
    """How the text of a constraint is read, with the names of the fields in inference.proto."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A form of the answer.

    `text` is the schema, the regular expression or the grammar; of a choice, the alternatives as a
    JSON array; of a JSON object, empty. The constraint begins `after` this text has appeared in the
    answer, or with the answer if it is empty. `lenient`: keywords of a schema that cannot be enforced are
    left out of it instead of being refused.
    """

    kind: ConstraintKind
    text: str = ""
    after: str = ""
    lenient: bool = False

    @classmethod
    def json_object(cls) -> Constraint:
        return cls(ConstraintKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str, *, lenient: bool = False) -> Constraint:
        return cls(ConstraintKind.JSON_SCHEMA, schema, lenient=lenient)

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def choice(cls, alternatives: Sequence[str]) -> Constraint:
        """Returns the constraint to one of the alternatives.

        INVALID_ARGUMENT: there are none or too many, or one of them is empty.
        """
        field = f"{FIELD}.choice"
        if not 1 <= len(alternatives) <= MAX_ALTERNATIVES:
            raise errors.invalid(field, f"must have 1 to {MAX_ALTERNATIVES} alternatives", len(alternatives))
        if not all(alternatives):
            raise errors.invalid(field, "no alternative may be empty")
        return cls(ConstraintKind.CHOICE, json.dumps(list(alternatives), ensure_ascii=False))

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        return cls(ConstraintKind.GRAMMAR, lark)

    @property
    def field(self) -> str:
        """The name of the field that errors are about."""
        return f"{FIELD}.{self.kind.value}"

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The alternatives of a choice."""
        return tuple(json.loads(self.text)) if self.kind is ConstraintKind.CHOICE else ()

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT, which names the field, for a text that is empty, too long or no Unicode."""
        if self.kind is not ConstraintKind.JSON_OBJECT and not self.text:
            raise errors.invalid(self.field, "must not be empty")
        if len(self.after) > MAX_AFTER_CHARS:
            raise errors.invalid(f"{FIELD}.after", f"must have at most {MAX_AFTER_CHARS} characters", len(self.after))
        for field, text in ((self.field, self.text), (f"{FIELD}.after", self.after)):
            if _utf8_bytes(text, field) > MAX_CONSTRAINT_BYTES:
                raise errors.invalid(field, f"must have at most {MAX_CONSTRAINT_BYTES} bytes", _utf8_bytes(text, field))


def _utf8_bytes(text: str, field: str) -> int:
    if len(text) > MAX_CONSTRAINT_BYTES:
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise errors.invalid(field, "must not have half a surrogate pair") from None
