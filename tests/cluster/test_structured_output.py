"""Constrained answers of a whole cluster: over HTTP with the official client, over gRPC, with the node killed in the middle."""

from __future__ import annotations

import json
import os
import signal
from typing import Any, Literal

import grpc
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

QUESTION = [{"role": "user", "content": "Count from 1 to 5."}]


class Person(BaseModel):
    name: Literal["Tavik", "Olin"]
    age: Literal[7, 42]
    tags: tuple[Literal["a", "b"], Literal["c"]]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "minLength": 6, "maxLength": 9}, "minItems": 8, "maxItems": 8},
        "done": {"type": "boolean"},
    },
    "required": ["words", "done"],
    "additionalProperties": False,
}


@pytest.fixture
def http(calm: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{calm.cluster.http_url}/v1", api_key="none", max_retries=0)


def test_the_official_client_parses_a_pydantic_model(http: openai.OpenAI) -> None:
    answer = http.chat.completions.parse(model="demo", messages=QUESTION, response_format=Person, max_tokens=80, seed=1)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_of_several_choices_is_valid_json(http: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
    texts, reasons = ["", "", ""], {}
    stream = http.chat.completions.create(
        model="demo", messages=QUESTION, response_format=wanted, n=3, seed=3, stream=True, max_tokens=400
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert set(reasons.values()) == {"stop"}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("extra", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "x{3}"}, {"xxx"}),
        ({"guided_grammar": 'start: "a" "b"'}, {"ab"}),
        ({"guided_json": {"const": 5}}, {"5"}),
        ({"structured_outputs": {"json": {"enum": [None]}}}, {"null"}),
        ({"structured_outputs": {"choice": ["só"]}}, {"só"}),
    ],
    ids=min,
)
def test_vllms_fields_constrain_completions_too(http: openai.OpenAI, extra: dict[str, Any], allowed: set[str]) -> None:
    answer = http.completions.create(model="demo", prompt="Say", max_tokens=20, extra_body=extra)
    assert answer.choices[0].text in allowed


def test_a_schema_that_cannot_be_enforced_is_a_bad_request_with_its_path(http: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as refused:
        http.chat.completions.create(
            model="demo",
            messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
        )
    assert refused.value.param == "response_format"
    assert refused.value.code == "invalid_constraint"
    assert "#/properties/a/uniqueItems" in str(refused.value)


def test_grpc_takes_and_refuses_constraints(calm: Any) -> None:
    sampling = inference.SamplingParams(constraint=inference.Constraint(json_schema='{"const": {"a": 1}}'), temperature=0)
    request = inference.CompleteRequest(text="Say", sampling=sampling)
    assert json.loads(calm.client.inference.Complete(request, timeout=30).choices[0].text) == {"a": 1}
    request.sampling.constraint.regex = "("
    with pytest.raises(grpc.RpcError) as refused:
        calm.client.inference.Complete(request, timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.constraint.regex" in refused.value.details()


def test_an_answer_stays_the_same_when_its_node_is_killed_in_the_middle_of_an_object(stormy: Any) -> None:
    constraint = inference.Constraint(json_schema=json.dumps(SCHEMA))
    asked = {"seed": 11, "temperature": 1.0, "n": 2, "constraint": constraint, "max_tokens": 400}
    whole = stormy.client.chat("Hello!", **asked)
    killed: list[str] = []

    def kill(delta: inference.GenerationDelta) -> None:
        if delta.first_index > 15 and not killed:
            killed.append(delta.node_id)
            os.kill(stormy.cluster.services[delta.node_id].pid, signal.SIGKILL)

    answer = stormy.client.chat("Hello!", on_delta=kill, **asked)
    assert killed
    for number, choice in answer.choices.items():
        assert choice.token_ids == whole.choices[number].token_ids
        assert choice.reason == whole.choices[number].reason == inference.FINISH_REASON_STOP
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert len({node for choice in answer.choices.values() for node in choice.nodes}) == 2
    stormy.start_again(killed[0])
