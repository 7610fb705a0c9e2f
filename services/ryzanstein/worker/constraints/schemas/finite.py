"""Finds schemas that no finite JSON satisfies, such as a list node that requires a next one.

The model would write such an answer until its last token. A schema is finite if some JSON of it
ends: the least fixed point over all parts of the document. Values are not considered, only how
schemas contain each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ryzanstein.worker.constraints.schemas.keywords import LIST_OF_SCHEMAS, NAMED_SCHEMAS, ONE_SCHEMA

Part = Mapping[str, Any] | bool


def endless(root: Mapping[str, Any]) -> str | None:
    """Returns the path of the first part that no finite JSON satisfies, or None.

    `false` is no such part: nobody writes anything there. References that lead nowhere are
    somebody else's error.
    """
    by_path = dict(parts(root, "#"))
    ends: set[str] = set()
    while grown := [path for path, part in by_path.items() if path not in ends and _ends(part, path, by_path, ends)]:
        ends.update(grown)
    return next((path for path, part in by_path.items() if path not in ends and part is not False), None)


def parts(part: Part, path: str) -> Iterator[tuple[str, Part]]:
    """Yields a checked schema and the schemas in it, with their paths."""
    yield path, part
    if isinstance(part, bool):
        return
    for name in part:
        if name in ONE_SCHEMA:
            yield from parts(part[name], f"{path}/{name}")
        elif name in LIST_OF_SCHEMAS:
            for i, each in enumerate(part[name]):
                yield from parts(each, f"{path}/{name}/{i}")
        elif name in NAMED_SCHEMAS:
            for key, each in part[name].items():
                yield from parts(each, f"{path}/{name}/{escaped(key)}")


def _ends(part: Part, path: str, by_path: Mapping[str, Part], ends: set[str]) -> bool:
    """Returns whether some JSON of the part ends, by what is known so far."""
    if isinstance(part, bool):
        return part
    target = part.get("$ref")
    if target is not None and target in by_path and target not in ends:
        return False
    if not all(f"{path}/allOf/{i}" in ends for i in range(len(part.get("allOf", ())))):
        return False
    for name in ("anyOf", "oneOf"):
        if name in part and not any(f"{path}/{name}/{i}" in ends for i in range(len(part[name]))):
            return False
    return _value_ends(part, path, ends)


def _value_ends(part: Mapping[str, Any], path: str, ends: set[str]) -> bool:
    types = part.get("type", "null")
    for each in types if isinstance(types, list) else [types]:
        if each == "object":
            required = (name for name in part.get("required", ()) if name in part.get("properties", {}))
            if all(f"{path}/properties/{escaped(name)}" in ends for name in required):
                return True
        elif each == "array":
            first = range(min(len(part.get("prefixItems", ())), int(part.get("minItems", 0))))
            rest = part.get("minItems", 0) > len(part.get("prefixItems", ())) and "items" in part
            if all(f"{path}/prefixItems/{i}" in ends for i in first) and not (rest and f"{path}/items" not in ends):
                return True
        else:
            return True
    return False


def escaped(name: str) -> str:
    """Returns a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
