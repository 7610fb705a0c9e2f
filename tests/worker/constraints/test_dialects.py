"""Schemas as generators write them: what they admit stays the same, and what demands nothing is no reason to refuse."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from ryzanstein.worker.constraints.refusal import ConstraintRefused
from ryzanstein.worker.constraints.schema import checked
from ryzanstein.worker.constraints.unions import told_apart

TEXT = {"type": "string"}
IDLE: list[dict[str, Any]] = [
    {"type": "string", "format": "idn-email"},
    {"type": "integer", "format": "int32"},
    {"type": "number", "format": "date-time"},
    {"type": "string", "nullable": True, "x-order": 3, "x-guidance": {"lenient": True}},
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "propertyNames": True, "unevaluatedProperties": {}},
    {"type": "string", "enum": ["a"], "enumNames": ["A"], "markdownDescription": "d", "errorMessage": {}},
    {"type": "array", "items": TEXT, "additionalItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "type": "object", "contentMediaType": "a/b"},
]


@pytest.mark.parametrize("schema", IDLE, ids=str)
def test_what_demands_nothing_is_taken(schema: dict[str, Any]) -> None:
    told = checked(schema)
    assert told.pop("x-guidance") != {"lenient": True}
    assert not {"format", "nullable", "propertyNames", "uniqueItems", "enumNames", "additionalItems"} & told.keys()


# What a generator writes, and the same in draft 2020-12.
SAME: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "items": [TEXT, {}]}, {"type": "array", "prefixItems": [TEXT, {}]}),
    ({"items": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"minimum": 3, "exclusiveMinimum": True}, {"exclusiveMinimum": 3}),
    ({"maximum": 3, "exclusiveMaximum": False}, {"maximum": 3}),
    ({"anyOf": [TEXT, {"not": {}}]}, {"anyOf": [TEXT, False]}),
    ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
    (
        {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": TEXT},
        {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": TEXT},
        {"patternProperties": {"^a": TEXT}, "additionalProperties": False},
    ),
    ({"type": "string", "format": "email", "pattern": "^(?!a).*$"}, {"type": "string", "format": "email"}),
]


@pytest.mark.parametrize(("written", "same"), SAME, ids=str)
def test_other_words_for_the_same_are_taken(written: dict[str, Any], same: Any) -> None:
    assert checked(written) == checked(same)


@pytest.mark.parametrize("bounds", [{}, {"minItems": 1}, {"minItems": 2, "maxItems": 2}])
@pytest.mark.parametrize("items", [{"enum": ["a", "b", "c"], "type": "string"}, {"const": "a"}, {"type": "boolean"}])
def test_a_small_set_has_no_repetitions(items: dict[str, Any], bounds: dict[str, int]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True, **bounds}
    if items == {"const": "a"} and bounds.get("minItems") == 2:
        with pytest.raises(ConstraintRefused, match="uniqueItems"):
            checked(schema)
        return
    told = checked(schema)
    values = items.get("enum") or ([items["const"]] if "const" in items else [True, False])
    lists = [[], *([a] for a in values), *([a, b] for a in values for b in values), [values[0]] * 3]
    for each in lists:
        wanted = jsonschema.Draft202012Validator(schema).is_valid(each)
        assert (each in told["enum"]) == wanted, each


def test_a_large_set_is_refused_by_path_and_without_strict_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": TEXT, "uniqueItems": True}}}
    with pytest.raises(ConstraintRefused, match="at #/properties/a/uniqueItems"):
        checked(schema)
    assert checked(schema, lenient=True)["properties"]["a"] == {"type": "array", "items": TEXT}


LENIENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tpye": "string"}, {}),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"anyOf": [{"type": "integer"}, {"type": "number"}]}),
    ({"type": "string", "pattern": "(?=a)"}, {"type": "string"}),
    ({"type": "object", "minProperties": 3}, {"type": "object"}),
    ({"anyOf": [{"if": {}, "type": "null"}, {"contains": {}}]}, {"anyOf": [{"type": "null"}, {}]}),
]


@pytest.mark.parametrize(("schema", "rest"), LENIENT, ids=str)
def test_without_strict_the_rest_is_enforced(schema: dict[str, Any], rest: dict[str, Any]) -> None:
    assert checked(schema, lenient=True) == checked(rest)
    json.dumps(checked(schema, lenient=True))


def tagged(*values: str, required: bool = True) -> dict[str, Any]:
    kind: dict[str, Any] = {"const": values[0], "type": "string"} if len(values) == 1 else {"enum": list(values)}
    return {"type": "object", "properties": {"kind": kind}, **({"required": ["kind"]} if required else {})}


@pytest.mark.parametrize(
    ("alternatives", "apart"),
    [
        ([tagged("a"), tagged("b")], True),
        ([tagged("a"), tagged("b", "c")], True),
        ([tagged("a", "b"), tagged("b")], False),
        ([tagged("a"), tagged("b", required=False)], False),
        ([tagged("a"), {"type": "string"}], False),
        ([{"$ref": "#/$defs/x~1y"}, tagged("b")], True),
        ([{"$ref": "#/$defs/none"}, tagged("b")], False),
        ([], False),
    ],
)
def test_a_union_that_a_property_tells_apart_is_any_of_it(alternatives: list[Any], apart: bool) -> None:
    schema = {"properties": {"pet": {"oneOf": alternatives}}, "$defs": {"x/y": tagged("a")}}
    told = told_apart(schema, schema)
    assert told["properties"]["pet"] == {"anyOf" if apart else "oneOf": alternatives}
