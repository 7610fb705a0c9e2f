"""instructor: typed answers in its modes, asked again when they do not validate, partial, and one after another."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import instructor
import openai
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from loops import MODEL, URL, City, run
from pydantic import AfterValidator, BaseModel, Field

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=100)
QUESTION: list[Any] = [{"role": "system", "content": "You plan."}, {"role": "user", "content": "A trip to Rome."}]


class Plan(BaseModel):
    """A schema as most are written, with nothing about other properties."""

    title: Annotated[str, Field(max_length=8)]
    cities: Annotated[list[City], Field(min_length=1, max_length=2)]


def conversation(mode: instructor.Mode, options: dict[str, Any]) -> Plan:
    asks, messages = instructor.from_openai(client, mode=mode), list(QUESTION)
    for _ in range(3):
        plan, raw = asks.chat.completions.create_with_completion(messages=messages, response_model=Plan, **options)
        assert raw.usage.total_tokens > 0
        messages += [{"role": "assistant", "content": plan.model_dump_json()}, {"role": "user", "content": "Another."}]
    return plan


def asked_again(mode: instructor.Mode, options: dict[str, Any]) -> int:
    """The first two answers are refused; instructor sends each back with what is wrong, which is not ASCII."""
    tries = []

    def third(value: str) -> str:
        tries.append(value)
        if len(tries) < 3:
            raise ValueError("noch einmal, größer: 日本")
        return value

    class Picky(BaseModel):
        name: Annotated[Literal["Rome", "Oslo"], AfterValidator(third)]

    asks = instructor.from_openai(client, mode=mode)
    asks.chat.completions.create(messages=QUESTION, response_model=Picky, max_retries=3, **options)
    assert len(tries) == 3
    return len(tries)


def partial(mode: instructor.Mode, options: dict[str, Any]) -> Plan:
    asks = instructor.from_openai(client, mode=mode)
    *begun, plan = asks.chat.completions.create_partial(messages=QUESTION, response_model=Plan, **options)
    assert begun
    assert plan.cities
    return plan


def one_after_another(mode: instructor.Mode, options: dict[str, Any]) -> int:
    asks = instructor.from_openai(client, mode=mode)
    return len(list(asks.chat.completions.create_iterable(messages=QUESTION, response_model=City, **options)))


def only_asked_for(mode: instructor.Mode) -> str:
    """The schema is in the prompt alone: whether these models keep to it is up to them."""
    asks = instructor.from_openai(client, mode=mode)
    try:
        asks.chat.completions.create(model=MODEL, messages=QUESTION, response_model=City, max_retries=2, max_tokens=24)
    except (IncompleteOutputException, InstructorRetryException) as error:
        return type(error).__name__
    return "valid"


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, limit: 250}
    run(f"{mode.name}, conversation", conversation, mode, options)
    run(f"{mode.name}, asked again", asked_again, mode, options)
    run(f"{mode.name}, partial", partial, mode, options)
run(
    "JSON_SCHEMA, one after another",
    one_after_another,
    instructor.Mode.JSON_SCHEMA,
    {"model": MODEL, "temperature": 0, "max_tokens": 120},
)
for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
    run(f"{mode.name}, only asked for", only_asked_for, mode)
