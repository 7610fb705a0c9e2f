"""What is refused of a schema, and how the refusal names it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from tests.worker.constraints.random_schemas import random_schema

from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.schemas.finite import endless
from ryzanstein.worker.constraints.schemas.keywords import ANNOTATIONS, ENFORCED
from ryzanstein.worker.constraints.schemas.schema import checked, checked_schema
from ryzanstein.worker.constraints.schemas.unions import distinguishable

NESTED: Any = {}
for _ in range(70):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("schema", "where", "says", "cause"),
    [
        ({"tpye": "string"}, "#/tpye", "'tpye'", Cause.KEYWORD),
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems", "'uniqueItems'", Cause.KEYWORD),
        ({"properties": {"a/b": {"not": {"type": "null"}}}}, "#/properties/a~1b/not", "'not'", Cause.KEYWORD),
        ({"propertyNames": {"maxLength": 3}}, "#/propertyNames", "'propertyNames'", Cause.KEYWORD),
        ({"anyOf": [{}, {"if": {}}]}, "#/anyOf/1/if", "'if'", Cause.KEYWORD),
        ({"$defs": {"x": {"contains": {}}}}, "#/$defs/x/contains", "'contains'", Cause.KEYWORD),
        ({"items": {"$id": "http://a", "not": {"$ref": "#"}}}, "#/items/$id", "'$id'", Cause.KEYWORD),
        ({"$ref": "http://example.com/schema"}, "#/$ref", "within the schema", Cause.KEYWORD),
        ({"$ref": "file:///etc/passwd"}, "#/$ref", "within the schema", Cause.KEYWORD),
        ({"minProperties": 3, "required": ["a"]}, "#/minProperties", "up to 1", Cause.KEYWORD),
        ({"maxLength": 10**9}, "#/maxLength", "1048576", Cause.SIZE),
        ({"minItems": 1e300}, "#/minItems", "1048576", Cause.SIZE),
        ({"minLength": -1}, "#/minLength", "whole number", Cause.SCHEMA),
        ({"minLength": True}, "#/minLength", "whole number", Cause.SCHEMA),
        ({"exclusiveMinimum": "1"}, "#/exclusiveMinimum", "number", Cause.SCHEMA),
        ({"type": "strin"}, "#/type", "one or more of", Cause.SCHEMA),
        ({"type": []}, "#/type", "one or more of", Cause.SCHEMA),
        ({"properties": []}, "#/properties", "an object of schemas", Cause.SCHEMA),
        ({"properties": {"a": 3}}, "#/properties/a", "an object or a boolean", Cause.SCHEMA),
        ({"anyOf": []}, "#/anyOf", "not empty", Cause.SCHEMA),
        ({"required": "a"}, "#/required", "a list", Cause.SCHEMA),
        (3, "#", "an object or a boolean", Cause.SCHEMA),
        (False, "#", "no JSON", Cause.UNSATISFIABLE),
        (NESTED, "#" + "/items" * 65, "64 deep", Cause.SIZE),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_enforced_is_refused_by_name_and_path(schema: Any, where: str, says: str, cause: Cause) -> None:
    with pytest.raises(ConstraintRefused, match="at #") as refused:
        checked(schema)
    assert (refused.value.where, refused.value.cause) == (where, cause)
    assert says in refused.value.reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ('{"type": "object"', "not JSON"),
        ('{"minimum": NaN}', "NaN"),
        ('{"minimum": -Infinity}', "Infinity"),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "deep"),
        ("[" * 200_000, "deep"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_no_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConstraintRefused, match=says):
        checked_schema(text)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, "#"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#/$defs/a"),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, False]}}}, "#/properties/a"),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, None),
        ({"anyOf": [{"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, {"type": "null"}]}, None),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, None),
        ({"properties": {"a": False}}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_no_finite_json_satisfies_is_found(schema: dict[str, Any], path: str | None) -> None:
    assert endless(schema) == path


def test_a_checked_schema_means_what_the_schema_meant() -> None:
    for seed in range(300):
        schema = random_schema(seed)
        jsonschema.Draft202012Validator.check_schema(schema)
        bare = checked_schema(json.dumps(schema))
        del bare["x-guidance"]
        assert not ANNOTATIONS & _keywords(bare)
        assert json.dumps(_without_annotations(distinguishable(schema, schema))) == json.dumps(bare)


def test_no_keyword_is_both_enforced_and_an_annotation() -> None:
    assert not ENFORCED & ANNOTATIONS


def _keywords(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    nested = [*schema.get("properties", {}).values(), *schema.get("anyOf", []), *schema.get("prefixItems", [])]
    return set(schema).union(*map(_keywords, [*nested, schema.get("items")]))


def _without_annotations(schema: Any) -> Any:
    """Removes them by another way: the generator's own annotations have values that nothing else has."""
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {"title": "a title", "description": "what it is"}
    annotated = "title" in schema and schema["title"] == own["title"]
    kept = {name: value for name, value in schema.items() if not (annotated and name in (*own, "default"))}
    return {name: _without_annotations(value) for name, value in kept.items()}
