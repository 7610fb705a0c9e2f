"""Schemas as generators write them: what they admit stays the same, and what demands nothing is no reason to refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.demo import MODEL_DIR
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.refusal import ConstraintRefused
from ryzanstein.worker.constraints.schemas.schema import checked
from ryzanstein.worker.constraints.schemas.unions import distinguishable
from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.tokenizer import TextModel

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
    {"type": "object", "properties": {"a": {"$id": "b", "id": "c", "$anchor": "d", "type": "string"}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", "type": "object", "contentMediaType": "a/b"},
]


@pytest.mark.parametrize("schema", IDLE, ids=str)
def test_what_demands_nothing_is_taken(schema: dict[str, Any]) -> None:
    given = checked(schema)
    assert given.pop("x-guidance") != {"lenient": True}
    assert not {"format", "nullable", "propertyNames", "uniqueItems", "enumNames", "additionalItems"} & given.keys()


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
@pytest.mark.parametrize(
    "items", [{"enum": ["a", "b", "c"], "type": "string"}, {"const": "a"}, {"type": "boolean"}, {"enum": [1, True, None, "1"]}]
)
def test_a_small_set_has_no_repetitions(items: dict[str, Any], bounds: dict[str, int]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True, **bounds}
    if items == {"const": "a"} and bounds.get("minItems") == 2:
        with pytest.raises(ConstraintRefused, match="uniqueItems"):
            checked(schema)
        return
    given = checked(schema)
    values = items.get("enum") or ([items["const"]] if "const" in items else [True, False])
    lists = [[], *([a] for a in values), *([a, b] for a in values for b in values), [values[0]] * 3]
    for each in lists:
        wanted = jsonschema.Draft202012Validator(schema).is_valid(each)
        assert (json.dumps(each) in map(json.dumps, given["enum"])) == wanted, each


def test_a_set_is_small_by_the_number_of_its_lists() -> None:
    schema = {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True}
    with pytest.raises(ConstraintRefused, match="in at most 1024 arrangements"):
        checked(schema)
    assert len(checked({**schema, "maxItems": 3})["enum"]) == 1 + 8 + 56 + 336


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
    ({"type": "string", "required": True}, {"type": "string"}),
    ({"type": "object", "properties": [], "required": None}, {"type": "object"}),
    ({"type": "object", "properties": {"a": None, "b": {"type": "any"}}}, {"type": "object", "properties": {"a": {}, "b": {}}}),
    ({"type": ["file", "string", 3], "enum": [], "maxLength": "9"}, {"type": ["string"]}),
    ({"anyOf": [], "items": None, "additionalProperties": "false"}, {}),
    ({"$ref": "https://example.com/a.json", "type": "object"}, {"type": "object"}),
    (
        {"anyOf": [{"$ref": "#/$defs/none"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}},
        {"anyOf": [{}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}},
    ),
    ({"oneOf": [TEXT, {}], "anyOf": [TEXT]}, {"anyOf": [TEXT], "allOf": [{"anyOf": [TEXT, {}]}]}),
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
    given = distinguishable(schema, schema)
    assert given["properties"]["pet"] == {"anyOf" if apart else "oneOf": alternatives}


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return token_table(TextModel.load(MODEL_DIR))


def compiles(table: TokenTable, constraint: Constraint) -> bool:
    try:
        return bool(compiled(constraint, table, table.tokenizer()))
    except ConstraintRefused:
        return False


@pytest.mark.parametrize(
    "part",
    [
        {"pattern": "^(a|b)\\1$"},
        {"pattern": "\\bfoo\\b"},
        {"pattern": "^{[a-z]+}$"},
        {"pattern": "^(a"},
        {"patternProperties": {"^a": {"type": "null"}, "b$": TEXT}},
    ],
    ids=str,
)
def test_what_only_the_compiler_refuses_is_left_out_without_strict(part: dict[str, Any], table: TokenTable) -> None:
    whole = {"type": "string"} | part if "pattern" in part else {"type": "object"} | part
    text = json.dumps({"type": "object", "properties": {"a/b": {"anyOf": [whole, {"type": "null"}]}}, "required": ["a/b"]})
    assert not compiles(table, Constraint.json_schema(text))
    assert compiles(table, Constraint.json_schema(text, lenient=True))
    call = Constraint.grammar(f'start: "call" %json {text}')
    assert not compiles(table, call)
    assert compiles(table, replace(call, lenient=True))


def test_what_nothing_satisfies_stays_refused(table: TokenTable) -> None:
    text = json.dumps({"type": "integer", "minimum": 3, "maximum": 2})
    assert not compiles(table, Constraint.json_schema(text, lenient=True))


@pytest.mark.parametrize(
    "bounds", [{"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -(2**63)}, {"exclusiveMinimum": -1e30}]
)
def test_whole_numbers_of_64_bits_are_taken(bounds: dict[str, Any], table: TokenTable) -> None:
    """As generators of Rust and Go write their bounds."""
    assert compiles(table, Constraint.json_schema(json.dumps({"type": "integer", **bounds})))


def test_a_regular_expression_is_refused_in_one_sentence(table: TokenTable) -> None:
    with pytest.raises(ConstraintRefused) as refused:
        compiled(Constraint.json_schema('{"type": "string", "pattern": "(a)\\\\1"}'), table, table.tokenizer())
    assert refused.value.reason == "the regular expression is not supported: backreferences are not supported"
