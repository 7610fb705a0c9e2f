"""Random JSON schemas whose answers are short: with every enforced keyword, and nothing that may go on for ever."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("a", "b", "name", "count", "item list", 'quo"te', "ключ", "x/y~z")


def random_schema(seed: int) -> Schema:
    rng = random.Random(seed)
    schema = _any(rng, 3) if rng.random() < 0.2 else _object(rng, 3)
    if rng.random() < 0.3:
        schema = {"$defs": {"part": _leaf(rng), "t/ree": _tree(rng)}, **_with_references(rng, schema)}
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = [_leaf] if depth == 0 else [_leaf, _leaf, lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1), _one_of]
    schema = rng.choice(kinds)(rng)
    if rng.random() < 0.2:
        schema = {"title": "a title", "description": "what it is", "default": None, **schema}
    return {"anyOf": [schema, {"type": "null"}]} if rng.random() < 0.1 else schema


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.randint(1, 7)},
            {"type": "string", "maxLength": rng.randint(0, 6)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 9)},
            {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(x|yz)[0-9]?$", "^\\d{3}-\\w$"])},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
            {"enum": rng.sample(["red", "grün", 'a "b"', 7, -1.5, None, True, [1, "x"], {"k": 2}], rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 12, {"a": [None, False]}, "new\nline"])},
        ]
    )


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["allOf"] = [{"properties": {names[0]: True}, "required": [names[0]]}]
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 2}
    return schema


def _one_of(rng: random.Random) -> Schema:
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}, "v": _leaf(rng)}, "required": ["kind", "v"]} for kind in "ab"
    ]
    return {"oneOf": [{**kind, "additionalProperties": False} for kind in kinds]}


def _tree(rng: random.Random) -> Schema:
    """Recursive, and finite by an empty list of children."""
    children = {"type": "array", "items": {"$ref": "#/$defs/t~1ree"}, "maxItems": 1}
    return {
        "type": "object",
        "properties": {"leaf": {"type": "boolean"}, "children": children},
        "required": ["leaf"],
        "additionalProperties": False,
    }


def _with_references(rng: random.Random, schema: Schema) -> Schema:
    if "properties" not in schema:
        return schema
    part, tree = {"$ref": "#/$defs/part"}, {"$ref": "#/$defs/t~1ree"}
    return {**schema, "properties": {**schema["properties"], "part": part, "tree": tree}, "required": ["part"]}
