"""Objects that list their properties have no others; where schemas are merged, all stays open."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from ryzanstein.worker.constraints.schemas.schema import checked

TEXT = {"type": "string"}
CITY = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True},
    {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
    {"type": "object", "properties": {"a": TEXT}, "patternProperties": {"^x": {}}},
    {"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"]},
    {"type": "object", "properties": {}, "minProperties": 1},
    {"allOf": [CITY, {"type": "object", "properties": {"days": TEXT}}]},
    {**CITY, "anyOf": [{"required": ["name"]}, {"required": ["days"]}]},
    {"$defs": {"city": CITY}, "$ref": "#/$defs/city", "properties": {"days": TEXT}},
]


def admits(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_an_object_is_open_that_says_so_or_could_not_be_satisfied_otherwise(schema: dict[str, Any]) -> None:
    value = {"a": "x", "b": "y", "name": "Rome", "days": "2"} | ({"x": 1} if "patternProperties" in schema else {})
    assert admits(checked(schema), value)


@pytest.mark.parametrize(
    ("schema", "less", "more"),
    [
        (CITY, {"name": "Rome"}, {"name": "Rome", "x": 1}),
        ({"type": "object", "properties": {}}, {}, {"x": 1}),
        ({"type": "array", "items": CITY}, [{"name": "Rome"}], [{"name": "Rome", "x": 1}]),
        ({"anyOf": [{"type": "null"}, CITY]}, {"name": "Rome"}, {"name": "Rome", "x": 1}),
        ({"allOf": [CITY]}, {"name": "Rome"}, {"name": "Rome", "x": 1}),
        (
            {"$defs": {"city": CITY}, "type": "object", "properties": {"to": {"$ref": "#/$defs/city"}}},
            {"to": {"name": "Rome"}},
            {"to": {"name": "Rome", "x": 1}},
        ),
    ],
    ids=str,
)
def test_an_object_that_lists_its_properties_has_no_others(schema: dict[str, Any], less: Any, more: Any) -> None:
    given = checked(schema)
    assert admits(schema, more)
    assert admits(given, less)
    assert not admits(given, more)
