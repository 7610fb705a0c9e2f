"""Unions that a property tells apart, as Pydantic and zod write them: no value matches two alternatives.

llguidance does not see that of `oneOf`. As `anyOf` they mean the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ryzanstein.worker.constraints.schemas.keywords import LIST_OF_SCHEMAS, MAX_DEPTH, NAMED_SCHEMAS, ONE_SCHEMA

Schema = dict[str, Any]


def distinguishable(schema: Any, root: Any, depth: int = 0) -> Any:
    """Returns a schema in which such a `oneOf` is an `anyOf`. `root` is the document that references are within."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return schema
    given = {name: _part(name, value, root, depth + 1) for name, value in schema.items()}
    alternatives = given.get("oneOf")
    if "anyOf" in given or not isinstance(alternatives, list) or not _apart(alternatives, root):
        return given
    return {"anyOf" if name == "oneOf" else name: value for name, value in given.items()}


def _part(name: str, value: Any, root: Any, depth: int) -> Any:
    if name in ONE_SCHEMA:
        return distinguishable(value, root, depth)
    if name in LIST_OF_SCHEMAS and isinstance(value, list):
        return [distinguishable(each, root, depth) for each in value]
    if name in NAMED_SCHEMAS and isinstance(value, dict):
        return {key: distinguishable(each, root, depth) for key, each in value.items()}
    return value


def _apart(alternatives: Sequence[Any], root: Any) -> bool:
    """Returns whether some required property has other values in each alternative."""
    tagged = [dict(_tags(_target(each, root))) for each in alternatives]
    names = set(tagged[0]).intersection(*tagged[1:]) if tagged else set()
    return any(_disjoint([each[name] for each in tagged]) for name in names)


def _tags(schema: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields the required properties of an object that have one of some texts, with these."""
    if not isinstance(schema, dict) or schema.get("type") != "object" or not isinstance(schema.get("properties"), dict):
        return
    for name, value in schema["properties"].items():
        if isinstance(value, dict) and isinstance(schema.get("required"), list) and name in schema["required"]:
            values = [value["const"]] if "const" in value else value.get("enum")
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                yield name, values


def _disjoint(sets: Sequence[list[str]]) -> bool:
    return sum(len(set(values)) for values in sets) == len(set().union(*sets))


def _target(schema: Any, root: Any) -> Any:
    """Returns what a reference within the document means; another schema is itself."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or not schema["$ref"].startswith("#/"):
        return schema
    found = root
    for name in schema["$ref"].removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
