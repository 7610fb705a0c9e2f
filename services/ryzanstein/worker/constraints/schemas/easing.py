"""Leaves out of a schema what cannot be enforced, where a request does not demand that all of it is.

First what is seen in it: unknown keywords, values that are none of their keyword, references that lead
nowhere. What only the compiler refuses, mostly regular expressions, is found by asking it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ryzanstein.worker.constraints.schemas import finite
from ryzanstein.worker.constraints.schemas.dialects import LOOK_AROUND, plain
from ryzanstein.worker.constraints.schemas.keywords import (
    COUNTS,
    ENFORCED,
    LIST_OF_SCHEMAS,
    MAX_DEPTH,
    NAMED_SCHEMAS,
    NUMBERS,
    ONE_SCHEMA,
    TYPES,
)

Schema = dict[str, Any]
_MAX_ROUNDS = 16
_MAX_PARTS = 128
_DOUBTFUL = ("pattern", "patternProperties", "oneOf", "multipleOf", "$ref", "minimum", "maximum", "format")
"""What a compiler may refuse by itself."""


def eased(schema: Any) -> Any:
    """Returns a schema without the keywords that cannot be enforced, in all of its parts."""
    return _eased(schema, schema, 0)


def enforceable(schema: Schema, error_of: Callable[[Any], str]) -> Schema:
    """Returns a checked schema without what its compiler refuses. `error_of` returns the compiler's error, or nothing."""
    for _ in range(_MAX_ROUNDS):
        error = error_of(schema)
        smaller = _without_cause(schema, error, error_of) if error and "nsatisfiable" not in error else None
        if smaller is None:
            break
        schema = smaller
    return schema


def _without_cause(schema: Schema, error: str, error_of: Callable[[Any], str]) -> Schema | None:
    """Returns the schema without a keyword of its smallest part that is refused for the same reason."""
    parts = sorted(finite.parts(schema, "#"), key=lambda part: -part[0].count("/"))
    for path, part in parts[:_MAX_PARTS]:
        if isinstance(part, bool) or error_of(part) != error:
            continue
        for name in _DOUBTFUL:
            if name in part and error_of(rest := {key: each for key, each in part.items() if key != name}) != error:
                replaced: Schema = _replaced(schema, "#", path, rest)
                return replaced
    return None


def _replaced(value: Any, here: str, path: str, part: Schema) -> Any:
    if here == path:
        return part
    if isinstance(value, list):
        return [_replaced(each, f"{here}/{i}", path, part) for i, each in enumerate(value)]
    if isinstance(value, dict) and path.startswith(here):
        return {name: _replaced(each, f"{here}/{finite.escaped(name)}", path, part) for name, each in value.items()}
    return value


def _eased(schema: Any, root: Any, depth: int) -> Any:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        return {}
    if depth > MAX_DEPTH:
        return schema
    given = plain({name: value for name, value in schema.items() if name not in _WHAT or _WHAT[name](value)})
    if isinstance(given, bool):
        return given
    return dict(_entries(_weakened(given, root), root, depth + 1))


def _weakened(given: Schema, root: Any) -> Schema:
    """Returns a schema with what is enforced of some of its keywords, or without them."""
    if isinstance(given.get("oneOf"), list):  # what matches exactly one matches any
        any_of = given.pop("oneOf")
        given = (
            {**given, "allOf": [*given.get("allOf", ()), {"anyOf": any_of}]} if "anyOf" in given else {**given, "anyOf": any_of}
        )
    if LOOK_AROUND.search(given.get("pattern", "")):
        del given["pattern"]
    if given.get("minProperties", 0) > max(1, len(given.get("required", ()))):
        del given["minProperties"]
    if "$ref" in given and not _leads(given["$ref"], root):
        del given["$ref"]
    return given


def _entries(given: Schema, root: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name not in ENFORCED:
            continue
        if name in ONE_SCHEMA:
            yield name, _eased(value, root, depth)
        elif name in LIST_OF_SCHEMAS:
            yield name, [_eased(each, root, depth) for each in value]
        elif name in NAMED_SCHEMAS:
            yield name, {key: _eased(each, root, depth) for key, each in value.items()}
        elif name == "type":
            yield name, [each for each in _listed(value) if each in TYPES] if isinstance(value, list) else value
        else:
            yield name, value


def _leads(reference: Any, root: Any) -> bool:
    """Returns whether a reference leads to a part of the document."""
    if reference == "#":
        return True
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return False
    found = root
    for name in reference.removeprefix("#/").split("/"):
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else _at(found, key)
    return isinstance(found, dict | bool) or "%" in reference


def _at(found: Any, key: str) -> Any:
    inside = isinstance(found, list) and key.isdecimal() and int(key) < len(found)
    return found[int(key)] if inside else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value == value // 1 and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _has_types(value: Any) -> bool:
    return any(isinstance(each, str) and each in TYPES for each in _listed(value))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# What the values of keywords are, where others mean nothing.
_WHAT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys(NUMBERS - {"exclusiveMinimum", "exclusiveMaximum"}, _is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float)),
    **dict.fromkeys(NAMED_SCHEMAS, _is_table),
    **dict.fromkeys(LIST_OF_SCHEMAS, _is_list),
    **dict.fromkeys(("pattern", "format", "$ref"), _is_text),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "items": lambda value: isinstance(value, dict | bool | list),
    "additionalProperties": lambda value: isinstance(value, dict | bool),
    "type": _has_types,
    "required": _are_names,
    "enum": _is_list,
}
