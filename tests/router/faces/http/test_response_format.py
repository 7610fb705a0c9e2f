"""What bodies ask for, as the constraint that reaches the core."""

from __future__ import annotations

import json

import pytest

from ryzanstein import errors
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


UNENFORCED = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"guided_json": UNENFORCED}, "guided_json"),
        ("/v1/chat/completions", {"structured_outputs": {"json": UNENFORCED}}, "structured_outputs"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}, "stream": True}, "response_format"),
        ("/v1/completions", {"guided_regex": "(?=a)"}, "guided_regex"),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_an_error_names_the_field_in_which_the_client_wrote_it(http, face, path, fields, param):
    face.core.refusal = errors.invalid("sampling.constraint.json_schema", "at #/uniqueItems: is not supported")
    body = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path) or {"messages": MESSAGES}
    refused = (await http.post(path, json={"model": "echo", **body, **fields})).json()["error"]
    assert (refused["param"], refused["message"]) == (param, f"{param}: at #/uniqueItems: is not supported")


async def test_a_tool_is_named_by_its_place_in_the_body(http, face):
    face.core.refusal = errors.invalid("tools[0].function.parameters", "at #/if: is not supported")
    body = {"input": "a", "tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}
    refused = (await http.post("/v1/responses", json={"model": "echo", **body})).json()["error"]
    assert (refused["param"], refused["message"]) == ("tools[1].parameters", "tools[1].parameters: at #/if: is not supported")


@pytest.mark.parametrize("strict", [True, False, None])
async def test_only_a_strict_schema_is_refused_for_what_cannot_be_enforced(http, face, strict):
    form = {"name": "n", "schema": UNENFORCED, "strict": strict}
    chat = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": form}}
    response = {"input": "a", "text": {"format": {"type": "json_schema", **form}}}
    for path, body in (("/v1/chat/completions", chat), ("/v1/responses", response)):
        answer = await http.post(path, json={"model": "echo", **body})
        assert answer.status_code == 200, answer.text
        assert face.core.requests[-1].sampling.constraint.lenient is (strict is not True)
    await http.post("/v1/chat/completions", json={"model": "echo", "messages": MESSAGES, "guided_json": UNENFORCED})
    assert not face.core.requests[-1].sampling.constraint.lenient


async def test_the_message_of_an_error_names_the_field_as_its_parameter_does(http):
    refused = (await http.post("/v1/chat/completions", json={"messages": MESSAGES, "temperature": 5})).json()["error"]
    assert (refused["param"], refused["message"].partition(":")[0]) == ("temperature", "temperature")
