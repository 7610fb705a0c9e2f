"""What agents do with the official client: typed answers of many kinds, and steps that send back what the last one returned."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.long

QUESTION: list[Any] = [{"role": "user", "content": "Count from 1 to 5."}]


class Mood(enum.StrEnum):
    GLAD = "glad"
    SAD = "sad"


class Plain(BaseModel):
    mood: Mood
    count: Literal[1, 2, 3]


class Optionals(BaseModel):
    a: Literal["x"] | None = None
    b: Literal["y"] | None


class Nested(BaseModel):
    inner: Plain
    more: Annotated[list[Plain], Field(max_length=1)]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Union(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Sets(BaseModel):
    tags: set[Literal["a", "b"]]


class Pairs(BaseModel):
    pair: tuple[Literal["a"], bool]


class Tree(BaseModel):
    value: Literal[1]
    children: Annotated[list[Tree], Field(max_length=1)]


class Numbers(BaseModel):
    price: Annotated[float, Field(gt=0, le=10, multiple_of=0.5)]


class Strings(BaseModel):
    name: Annotated[str, Field(pattern="^[a-c]{1,3}$")]
    alias: Annotated[str, Field(max_length=4, alias="theAlias")]


class Maps(BaseModel):
    by_name: dict[Literal["a", "b"], Literal[1]]


class Decorated(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"x-order": ["a"], "examples": [{}]})
    a: Literal[5] = Field(5, title="T", description="d", examples=[5])


KINDS = [Plain, Optionals, Nested, Union, Sets, Pairs, Tree, Numbers, Strings, Maps, Decorated]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture
def client(calm: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{calm.cluster.http_url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_answer_is_parsed_as_a_model_of_any_kind(client: openai.OpenAI, kind: type[BaseModel]) -> None:
    options: dict[str, Any] = {"model": "demo", "temperature": 0}
    answer = client.chat.completions.parse(messages=QUESTION, response_format=kind, max_tokens=200, **options)
    assert isinstance(answer.choices[0].message.parsed, kind)
    with client.chat.completions.stream(messages=QUESTION, response_format=kind, max_tokens=200, **options) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
    response = client.responses.parse(input="Hello", text_format=kind, max_output_tokens=200, **options)
    assert isinstance(response.output_parsed, kind)


def test_an_agent_goes_on_with_what_the_stream_helper_collected(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    messages = list(QUESTION)
    for step in range(3):
        with client.chat.completions.stream(
            model="demo", messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=100
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls
        (call,) = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)
        messages.append(message if step % 2 else message.model_dump(warnings=False))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    assert client.chat.completions.create(model="demo", messages=messages, tools=tools, max_tokens=8).choices


def test_an_agent_goes_on_with_the_items_of_responses(client: openai.OpenAI) -> None:
    schema = {**Weather.model_json_schema(), "additionalProperties": False}
    tools: Any = [{"type": "function", "name": "Weather", "parameters": schema, "strict": True}, {"type": "web_search"}]
    items: list[Any] = list(QUESTION)
    for _ in range(3):
        with client.responses.stream(
            model="demo",
            input=items,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=100,
            store=False,
            reasoning={"effort": "low", "summary": "auto"},
            text={"verbosity": "low"},
            include=["reasoning.encrypted_content"],
        ) as stream:
            output = stream.get_final_response().output
        calls = [item for item in output if item.type == "function_call"]
        assert len(calls) == 1
        items += [item.model_dump(warnings=False) for item in output]
        items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"})
