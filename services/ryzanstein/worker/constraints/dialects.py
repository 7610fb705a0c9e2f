"""Schemas as generators of them write them, in the keywords that are enforced.

zod, Pydantic, OpenAPI 3.0, draft 7 and MCP servers say the same in other words. Only what means exactly the
same is rewritten; the rest stays, and is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

from ryzanstein.worker.constraints.keywords import (
    ANNOTATIONS,
    ENFORCED,
    FORMATS,
    LIST_OF_SCHEMAS,
    MAX_DEPTH,
    NAMED_SCHEMAS,
    ONE_SCHEMA,
)

Schema = dict[str, Any]
MAX_UNIQUE_VALUES = 4
"""A set of at most so many values is written as all of its arrangements: 65."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties"})


def plain(schema: Schema) -> Schema | bool:
    """Returns one schema, without its parts, in the keywords of draft 2020-12 that say the same."""
    if schema.get("not") in ({}, True) and "not" in schema:
        return False  # zod's `never`
    told = {name: value for name, value in schema.items() if not is_annotation(name)}
    for rewrite in _REWRITES:
        told = rewrite(told)
    return told


def eased(schema: Any, depth: int) -> Any:
    """Returns a schema without the keywords that cannot be enforced, in all of its parts."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    told = plain(schema)
    if isinstance(told, bool):
        return told
    if isinstance(told.get("oneOf"), list) and "anyOf" not in told:  # what matches exactly one matches any
        told = {**_less(told, "oneOf"), "anyOf": told["oneOf"]}
    if isinstance(told.get("pattern"), str) and _LOOK_AROUND.search(told["pattern"]):
        told = _less(told, "pattern")
    if _whole(told.get("minProperties"), 0) > max(1, len(told.get("required") or ())):
        told = _less(told, "minProperties")
    return {name: _eased_part(name, value, depth + 1) for name, value in told.items() if name in ENFORCED}


def _eased_part(name: str, value: Any, depth: int) -> Any:
    if name in ONE_SCHEMA:
        return eased(value, depth)
    if name in LIST_OF_SCHEMAS and isinstance(value, list):
        return [eased(each, depth) for each in value]
    if name in NAMED_SCHEMAS and isinstance(value, dict):
        return {key: eased(each, depth) for key, each in value.items()}
    return value


def is_annotation(name: str) -> bool:
    """Returns whether a keyword says nothing about which values are valid."""
    return name in ANNOTATIONS or name.startswith("x-")


def _without_idle(told: Schema) -> Schema:
    """Leaves out what demands nothing with this value."""
    return {name: value for name, value in told.items() if not (name in _IDLE and any(value is each for each in _IDLE[name]))}


_IDLE: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "propertyNames": (True,),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}


def _format(told: Schema) -> Schema:
    """A format is an annotation unless it is known and of a string. zod writes it with a pattern, which may look around."""
    if "format" not in told:
        return told
    known = isinstance(told["format"], str) and told["format"] in FORMATS and "string" in _types(told, "string")
    if not known:
        return _less(told, "format")
    looks = isinstance(told.get("pattern"), str) and _LOOK_AROUND.search(told["pattern"]) is not None
    return _less(told, "pattern") if looks else told


def _names(told: Schema) -> Schema:
    """`propertyNames` of a record: any string, one of some names, or a pattern."""
    names = told.get("propertyNames")
    if not isinstance(names, dict):
        return told
    bare = {name: value for name, value in names.items() if not is_annotation(name) and (name, value) != ("type", "string")}
    if not bare:
        return _less(told, "propertyNames")
    if len(bare) > 1 or "properties" in told or "patternProperties" in told:
        return told
    values, rest = told.get("additionalProperties", {}), _less(told, "propertyNames", "additionalProperties")
    if isinstance(listed := bare.get("enum"), list) and all(isinstance(each, str) for each in listed):
        return {**rest, "properties": dict.fromkeys(listed, values), "additionalProperties": False}
    if "pattern" in bare:
        return {**rest, "patternProperties": {bare["pattern"]: values}, "additionalProperties": False}
    return told


def _tuples(told: Schema) -> Schema:
    """Draft 7: a list of schemas in `items`, and `additionalItems` for the others."""
    if not isinstance(listed := told.get("items"), list) or "prefixItems" in told:
        return _less(told, "additionalItems") if "items" in told else told
    rest = {"items": told["additionalItems"]} if "additionalItems" in told else {}
    return {**_less(told, "items", "additionalItems"), **({"prefixItems": listed} if listed else {}), **rest}


def _exclusive(told: Schema) -> Schema:
    """Draft 4 and OpenAPI 3.0: whether the bound itself is excluded."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if told.get(flag) is True and bound in told:
            told = {**_less(told, flag, bound), flag: told[bound]}
    return told


def _closed(told: Schema) -> Schema:
    """`unevaluatedProperties` beside no other schema of the same object is `additionalProperties`."""
    if "unevaluatedProperties" not in told or "additionalProperties" in told or not _APPLICATORS.isdisjoint(told):
        return told
    return {**_less(told, "unevaluatedProperties"), "additionalProperties": told["unevaluatedProperties"]}


def _unique(told: Schema) -> Schema:
    """A list without repetitions, of at most one entry or of few values."""
    if told.get("uniqueItems") is not True:
        return told
    bare = _less(told, "uniqueItems")
    if _whole(told.get("maxItems"), 2) <= 1:
        return bare
    values = _values(told.get("items"))
    if values is None or len(values) > MAX_UNIQUE_VALUES or told.get("type") != "array" or "prefixItems" in told:
        return told
    fewest, most = _whole(told.get("minItems"), 0), _whole(told.get("maxItems"), len(values))
    rest = _less(bare, "type", "items", "minItems", "maxItems")
    lists = [list(each) for count in range(fewest, min(most, len(values)) + 1) for each in permutations(values, count)]
    return {**rest, "enum": lists} if lists else told


def _values(items: Any) -> list[Any] | None:
    """Returns all values that a schema admits; None: not known, or many."""
    if not isinstance(items, dict):
        return None
    bare = {name: value for name, value in items.items() if not is_annotation(name)}
    if bare == {"type": "boolean"}:
        return [False, True]
    listed = [bare["const"]] if "const" in bare else bare.get("enum")
    if not isinstance(listed, list) or not set(bare) <= {"enum", "const", "type"}:
        return None
    simple = all(isinstance(each, str) for each in listed) and bare.get("type", "string") == "string"
    return list(dict.fromkeys(listed)) if simple else None


def _types(told: Schema, default: str) -> list[Any]:
    types = told.get("type", default)
    return types if isinstance(types, list) else [types]


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _less(told: Schema, *names: str) -> Schema:
    return {name: value for name, value in told.items() if name not in names}


_REWRITES: tuple[Callable[[Schema], Schema], ...] = (_without_idle, _format, _names, _tuples, _exclusive, _closed, _unique)
