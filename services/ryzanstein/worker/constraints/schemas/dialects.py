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
    given = {name: value for name, value in schema.items() if not is_annotation(name)}
    for rewrite in _REWRITES:
        given = rewrite(given)
    return given


def is_annotation(name: str) -> bool:
    """Returns whether a keyword says nothing about which values are valid."""
    return name in ANNOTATIONS or name.startswith("x-")


def _without_idle(given: Schema) -> Schema:
    """Leaves out what demands nothing with this value."""
    return {name: value for name, value in given.items() if not (name in _IDLE and any(value is each for each in _IDLE[name]))}


_IDLE: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True,),
    "unevaluatedItems": (True,),
    "propertyNames": (True,),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}


def _format(given: Schema) -> Schema:
    """A format is an annotation unless it is known and of a string. zod writes it with a pattern, which may look around."""
    if "format" not in given:
        return given
    known = isinstance(given["format"], str) and given["format"] in FORMATS and "string" in _types(given, "string")
    if not known:
        return _less(given, "format")
    looks = isinstance(given.get("pattern"), str) and LOOK_AROUND.search(given["pattern"]) is not None
    return _less(given, "pattern") if looks else given


def _names(given: Schema) -> Schema:
    """`propertyNames` of a record: any string, one of some names, or a pattern."""
    names = given.get("propertyNames")
    if not isinstance(names, dict):
        return given
    bare = {name: value for name, value in names.items() if not is_annotation(name) and (name, value) != ("type", "string")}
    if not bare:
        return _less(given, "propertyNames")
    if len(bare) > 1 or "properties" in given or "patternProperties" in given:
        return given
    values, rest = given.get("additionalProperties", {}), _less(given, "propertyNames", "additionalProperties")
    if isinstance(listed := bare.get("enum"), list) and all(isinstance(each, str) for each in listed):
        return {**rest, "properties": dict.fromkeys(listed, values), "additionalProperties": False}
    if "pattern" in bare:
        return {**rest, "patternProperties": {bare["pattern"]: values}, "additionalProperties": False}
    return given


def _tuples(given: Schema) -> Schema:
    """Draft 7: a list of schemas in `items`, and `additionalItems` for the others."""
    if not isinstance(listed := given.get("items"), list) or "prefixItems" in given:
        return _less(given, "additionalItems") if "items" in given else given
    rest = {"items": given["additionalItems"]} if "additionalItems" in given else {}
    return {**_less(given, "items", "additionalItems"), **({"prefixItems": listed} if listed else {}), **rest}


def _exclusive(given: Schema) -> Schema:
    """Draft 4 and OpenAPI 3.0: whether the bound itself is excluded."""
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if given.get(flag) is True and bound in given:
            given = {**_less(given, flag, bound), flag: given[bound]}
    return given


def _closed(given: Schema) -> Schema:
    """`unevaluatedProperties` beside no other schema of the same object is `additionalProperties`."""
    if "unevaluatedProperties" not in given or "additionalProperties" in given or not _APPLICATORS.isdisjoint(given):
        return given
    return {**_less(given, "unevaluatedProperties"), "additionalProperties": given["unevaluatedProperties"]}


def _unique(given: Schema) -> Schema:
    """A list without repetitions, of at most one entry or of few values."""
    if given.get("uniqueItems") is not True:
        return given
    bare = _less(given, "uniqueItems")
    if _whole(given.get("maxItems"), 2) <= 1:
        return bare
    values = _values(given.get("items"))
    if values is None or given.get("type") != "array" or "prefixItems" in given:
        return given
    fewest, most = _whole(given.get("minItems"), 0), min(_whole(given.get("maxItems"), len(values)), len(values))
    counts = range(fewest, most + 1)
    if not counts or sum(perm(len(values), count) for count in counts) > MAX_ARRANGEMENTS:
        return given
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


def _least(given: Schema) -> Schema:
    """The least of 64 bits, which generators of Rust and Go write."""
    whole = _types(given, "") == ["integer"]
    low = [name for name in ("minimum", "exclusiveMinimum") if whole and _is_number(given.get(name))]
    return given | {name: _LEAST_INTEGER for name in low if given[name] < _LEAST_INTEGER}


def _inner_names(given: Schema) -> Schema:
    """A name of a part that no reference depends on. `id` was its name in draft 4."""
    known = {name: given[name] for name in ("$id", "id") if isinstance(given.get(name), str)}
    return given if not known or _refers(given) else _less(given, *known)


def _refers(value: Any) -> bool:
    """Returns whether there is a reference in a schema, however deep; True for one that is too deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for each in level if isinstance(each, dict | list)]
        if any(isinstance(each, dict) and "$ref" in each for each in level):
            return True
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _types(given: Schema, default: str) -> list[Any]:
    types = given.get("type", default)
    return types if isinstance(types, list) else [types]


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _less(given: Schema, *names: str) -> Schema:
    return {name: value for name, value in given.items() if name not in names}


_REWRITES: tuple[Callable[[Schema], Schema], ...] = (
    *(_without_idle, _inner_names, _format, _names, _tuples, _exclusive, _closed, _unique, _least),
)
