"""Closes objects: one that lists its properties, and says nothing of others, has no others.

JSON Schema allows others, but authors of `properties` rarely want them, and a small model that may add
properties adds them until it reaches `max_tokens`. vLLM's default does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ryzanstein.worker.constraints.schemas.keywords import LIST_OF_SCHEMAS, NAMED_SCHEMAS, ONE_SCHEMA

Schema = dict[str, Any]
_OWN = frozenset({"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"})
_OTHERS = ("additionalProperties", "patternProperties")


def closed(schema: Schema) -> Schema:
    """Returns a checked schema in which such objects are closed.

    None is where any two schemas apply to the same value: the properties of one are the others of the other.
    """
    return schema if any(map(_merges, _parts(schema))) else _closed(schema)


def _parts(schema: Any) -> Iterator[Schema]:
    """Yields a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        for each in _within(name, value):
            yield from _parts(each)


def _within(name: str, value: Any) -> list[Any]:
    if name in ONE_SCHEMA:
        return [value]
    if name in NAMED_SCHEMAS:
        return list(value.values())
    return list(value) if name in LIST_OF_SCHEMAS else []


def _merges(schema: Schema) -> bool:
    applied = [name for name in ("allOf", "anyOf", "oneOf", "$ref") if name in schema]
    sources = len(applied) + (not _OWN.isdisjoint(schema))
    return len(schema.get("allOf", ())) > 1 or (bool(applied) and sources > 1)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    given = {name: _closed_part(name, value) for name, value in schema.items()}
    return {**given, "additionalProperties": False} if _closable(schema) else given


def _closed_part(name: str, value: Any) -> Any:
    if name in ONE_SCHEMA:
        return _closed(value)
    if name in LIST_OF_SCHEMAS:
        return [_closed(each) for each in value]
    return {key: _closed(each) for key, each in value.items()} if name in NAMED_SCHEMAS else value


def _closable(schema: Schema) -> bool:
    listed = schema.get("properties")
    if listed is None or any(name in schema for name in _OTHERS):
        return False
    return set(schema.get("required", ())) <= set(listed) and schema.get("minProperties", 0) <= len(listed)
