"""Checks a JSON schema, and returns it without annotations.

Names what is refused with its path. What the keywords mean is llguidance's business; here is what
it would accept in silence or fail on in the middle of an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Never

from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.schemas import finite
from ryzanstein.worker.constraints.schemas.closing import closed
from ryzanstein.worker.constraints.schemas.dialects import MAX_ARRANGEMENTS, plain
from ryzanstein.worker.constraints.schemas.easing import eased
from ryzanstein.worker.constraints.schemas.keywords import (
    COUNTS,
    ENFORCED,
    LIST_OF_SCHEMAS,
    MAX_COUNT,
    MAX_DEPTH,
    NAMED_SCHEMAS,
    NUMBERS,
    ONE_SCHEMA,
    TYPES,
)
from ryzanstein.worker.constraints.schemas.unions import distinguishable

Schema = dict[str, Any]
WHITESPACE = r"(\x20|\x0A(\x20{0,12}|\x09{0,6}))"
"""What may be written at each place where JSON allows white space: a space, or a line break and an indent.

Any amount would let a model write white space until its last token.
"""


_ONLY = {"uniqueItems": f"is enforced only for known values, in at most {MAX_ARRANGEMENTS} arrangements, or maxItems 1"}
"""What is supported of keywords that are rewritten where that is possible."""


def checked_schema(text: str, *, lenient: bool = False) -> Schema:
    """Returns the schema. Raises ConstraintRefused."""
    return checked(parsed(text), lenient=lenient)


def checked(schema: Any, *, lenient: bool = False) -> Schema:
    """Returns a schema that llguidance may compile, with bounded white space. Raises ConstraintRefused.

    `lenient`: keywords that cannot be enforced are left out instead of being refused.
    """
    schema = distinguishable(schema, schema)
    if lenient:
        schema = eased(schema)
    bare = _checked(schema, "#", 0)
    if bare is True:
        bare = {}
    if not isinstance(bare, dict):
        _refuse("#", "no JSON satisfies it", Cause.UNSATISFIABLE)
    if (endless := finite.endless(bare)) is not None:
        _refuse(endless, "no finite JSON satisfies it", Cause.UNSATISFIABLE)
    return {**closed(bare), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def parsed(text: str) -> Any:
    """Returns the value of a JSON text. Raises ConstraintRefused."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        _refuse("#", f"must be nested at most {MAX_DEPTH} deep", Cause.SIZE)
    except ValueError as error:
        _refuse("#", f"is not JSON: {error}")


def pointer(parent: str, *names: str | int) -> str:
    """Returns the JSON pointer (RFC 6901) of a part, as a URI fragment that is not percent-encoded."""
    return "/".join((parent, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)))


def _no_number(name: str) -> Never:
    raise ValueError(f"{name} is not a number")


def _refuse(where: str, reason: str, cause: Cause = Cause.SCHEMA) -> Never:
    raise ConstraintRefused(cause, reason, where)


def _checked(schema: Any, where: str, depth: int) -> Schema | bool:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        _refuse(where, "must be a schema: an object or a boolean")
    if depth > MAX_DEPTH:
        _refuse(where, f"must be nested at most {MAX_DEPTH} deep", Cause.SIZE)
    given = plain(schema)
    return given if isinstance(given, bool) else dict(_entries(given, where, depth))


def _entries(schema: Schema, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        path = pointer(where, name)
        if name == "$id" and where == "#":
            continue
        if name not in ENFORCED:
            only = _ONLY.get(name, "is not supported")
            _refuse(path, f"the keyword {name[:64]!r} {only}", Cause.KEYWORD)
        if name in ONE_SCHEMA:
            yield name, _one(value, name, path, depth)
        elif name in LIST_OF_SCHEMAS:
            yield name, _listed(value, path, depth)
        elif name in NAMED_SCHEMAS:
            yield name, _named(value, path, depth)
        else:
            _check_value(name, value, path)
            yield name, value
    _check_together(schema, where)


def _one(value: Any, name: str, path: str, depth: int) -> Schema | bool:
    if name == "items" and isinstance(value, list):
        _refuse(path, "must be one schema; a list of them is prefixItems", Cause.KEYWORD)
    return _checked(value, path, depth + 1)


def _listed(value: Any, path: str, depth: int) -> list[Schema | bool]:
    if not isinstance(value, list) or not value:
        _refuse(path, "must be a list of schemas that is not empty")
    return [_checked(each, pointer(path, i), depth + 1) for i, each in enumerate(value)]


def _named(value: Any, path: str, depth: int) -> dict[str, Schema | bool]:
    if not isinstance(value, dict):
        _refuse(path, "must be an object of schemas")
    return {name: _checked(each, pointer(path, name), depth + 1) for name, each in value.items()}


def _check_value(name: str, value: Any, path: str) -> None:
    if name in COUNTS:
        _check_count(value, path)
    elif name in NUMBERS and not _is_number(value):
        _refuse(path, "must be a number")
    elif name == "type":
        _check_types(value, path)
    elif name == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        _refuse(path, "only references within the schema are supported: # or #/...", Cause.KEYWORD)
    elif name in ("enum", "required") and not isinstance(value, list):
        _refuse(path, "must be a list")


def _check_count(value: Any, path: str) -> None:
    if not _is_number(value) or value != value // 1 or value < 0:
        _refuse(path, "must be a whole number of at least 0")
    if value > MAX_COUNT:
        _refuse(path, f"must be at most {MAX_COUNT}", Cause.SIZE)


def _check_types(value: Any, path: str) -> None:
    types = value if isinstance(value, list) else [value]
    if not types or not all(isinstance(each, str) and each in TYPES for each in types):
        _refuse(path, f"must be one or more of {', '.join(sorted(TYPES))}")


def _check_together(schema: Schema, where: str) -> None:
    """Refuses what depends on several keywords.

    The names of additional properties may repeat in an answer, which counts as one property.
    """
    fewest, required = schema.get("minProperties", 0), schema.get("required", ())
    if fewest > max(1, len(required)):
        reason = f"is enforced only up to 1 or the number of required properties ({len(required)})"
        _refuse(pointer(where, "minProperties"), reason, Cause.KEYWORD)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
