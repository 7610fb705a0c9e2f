"""Schemas as generators of them write them, in the keywords that are enforced.

zod, Pydantic, OpenAPI 3.0, draft 7 and MCP servers say the same in other words. Only what means exactly the
same is rewritten; the rest stays, and is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import permutations
from math import perm
from typing import Any

from ryzanstein.worker.constraints.schemas.keywords import ANNOTATIONS, FORMATS, MAX_DEPTH

Schema = dict[str, Any]
MAX_ARRANGEMENTS = 1024
"""A list without repetitions, of some known values, is written as all lists of them: at most so many."""
_LEAST_INTEGER = -(2**63) + 1024
"""The integer type of 64 bits, as generators write it, begins 1024 before: no bound there can be enforced."""
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties"})


def plain(schema: Schema) -> Schema | bool:
    """Returns one schema, without its parts, in the keywords of draft 2020-12 that say the same."""
    if schema.get("not") in ({}, True) and "not" in schema:
        return False  # zod's `never`
    told = {name: value for name, value in schema.items() if not is_annotation(name)}
    for rewrite in _REWRITES:
        told = rewrite(told)
    return told


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
    looks = isinstance(told.get("pattern"), str) and LOOK_AROUND.search(told["pattern"]) is not None
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
    if values is None or told.get("type") != "array" or "prefixItems" in told:
        return told
    fewest, most = _whole(told.get("minItems"), 0), min(_whole(told.get("maxItems"), len(values)), len(values))
    counts = range(fewest, most + 1)
    if not counts or sum(perm(len(values), count) for count in counts) > MAX_ARRANGEMENTS:
        return told
    rest = _less(bare, "type", "items", "minItems", "maxItems")
    return {**rest, "enum": [list(each) for count in counts for each in permutations(values, count)]}


def _values(items: Any) -> list[Any] | None:
    """Returns all values that a schema admits; None: not known, or not all texts, whole numbers, booleans or null."""
    if not isinstance(items, dict):
        return None
    bare = {name: value for name, value in items.items() if not is_annotation(name)}
    if bare == {"type": "boolean"}:
        return [False, True]
    listed = [bare["const"]] if "const" in bare else bare.get("enum")
    if not isinstance(listed, list) or not set(bare) <= {"enum", "const", "type"}:
        return None
    types = set(_types(bare, "any"))
    distinct = {json.dumps(each): each for each in listed if "any" in types or types & _types_of(each)}
    return list(distinct.values()) if all(map(_types_of, listed)) else None


def _types_of(value: Any) -> set[str]:
    """Returns the types of a value that is simple: one that equals no value written otherwise."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    return {"string"} if isinstance(value, str) else {"integer", "number"} if isinstance(value, int) else set()


def _least(told: Schema) -> Schema:
    """The least of 64 bits, which generators of Rust and Go write."""
    whole = _types(told, "") == ["integer"]
    low = [name for name in ("minimum", "exclusiveMinimum") if whole and _is_number(told.get(name))]
    return told | {name: _LEAST_INTEGER for name in low if told[name] < _LEAST_INTEGER}


def _inner_names(told: Schema) -> Schema:
    """A name of a part that no reference depends on. `id` was its name in draft 4."""
    known = {name: told[name] for name in ("$id", "id") if isinstance(told.get(name), str)}
    return told if not known or _refers(told) else _less(told, *known)


def _refers(value: Any) -> bool:
    """Returns whether there is a reference in a schema, however deep; True for one that is too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for each in level if isinstance(each, dict | list)]
        if any(isinstance(each, dict) and "$ref" in each for each in level):
            return True
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _types(told: Schema, default: str) -> list[Any]:
    types = told.get("type", default)
    return types if isinstance(types, list) else [types]


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _less(told: Schema, *names: str) -> Schema:
    return {name: value for name, value in told.items() if name not in names}


_REWRITES: tuple[Callable[[Schema], Schema], ...] = (
    *(_without_idle, _inner_names, _format, _names, _tuples, _exclusive, _closed, _unique, _least),
)
