"""What bodies ask for, as the constraint that reaches the core."""

from __future__ import annotations

import json

import pytest

from ryzanstein.constraints import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None, "guided_choice": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "description": None, "strict": True, "schema": SCHEMA},
                }
            },
            Constraint.json_schema(json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Constraint.json_schema(json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Constraint.json_schema(json.dumps(SCHEMA))),
        ({"guided_regex": "[a-z]+"}, Constraint.regex("[a-z]+")),
        ({"guided_choice": ["a", 'b"']}, Constraint.choice(("a", 'b"'))),
        ({"guided_grammar": 'start: "a"'}, Constraint.grammar('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint.json_schema(json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a", "disable_fallback": True}}, Constraint.regex("a")),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_object()),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_a_body_asks_for_a_constraint(http, face, fields, constraint):
    response = await http.post("/v1/chat/completions", json={"model": "echo", "messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    (request,) = face.core.requests
    if constraint is None or constraint.kind.value != "json_schema":
        assert request.sampling.constraint == constraint
    else:
        assert json.loads(request.sampling.constraint.text) == json.loads(constraint.text)
