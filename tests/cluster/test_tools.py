"""Functions are called by the official client and over gRPC, in sessions, and across the loss of a node.

The demo model knows no tools: its template gets the generic form, and the grammar makes it call.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from ryzanstein.v1 import inference_pb2 as inference

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs/build/tools.md"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: Any = [{"role": "user", "content": "Count from 1 to 5."}]


@pytest.fixture(scope="module")
def sdk(calm: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calm.cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def the_calls(choice: Any) -> list[Any]:
    return list(choice.message.tool_calls or ())


def check_arguments(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), PLACE if name == "weather" else {"type": "object", "maxProperties": 0})


def test_a_named_function_is_called_with_arguments_of_its_schema(sdk: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        answer = sdk.chat.completions.create(
            model="demo", messages=QUESTION, tools=TOOLS, tool_choice=choice, temperature=1.5, seed=seed, max_tokens=400
        ).choices[0]
        assert answer.finish_reason == "stop", "as OpenAI answers"
        assert answer.message.content is None
        (call,) = the_calls(answer)
        assert call.type == "function"
        assert call.function.name == "weather"
        check_arguments("weather", call.function.arguments)


def test_an_answer_with_a_form_may_be_a_call_instead(calm: Any, sdk: openai.OpenAI) -> None:
    """As agents with a typed answer ask, at each of their steps; which of both it is, is up to the model."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    asked: dict[str, Any] = {"model": "demo", "messages": QUESTION, "tools": TOOLS, "response_format": form, "max_tokens": 120}
    tokens = httpx.post(f"{calm.cluster.http_url}/tokenize", json={"prompt": "<", "add_special_tokens": False}).json()
    begin = str(tokens["tokens"][0])
    called = sdk.chat.completions.create(logit_bias={begin: 100}, **asked).choices[0]
    assert next(call.function.name for call in the_calls(called)) in ("weather", "now")
    typed = sdk.chat.completions.create(logit_bias={begin: -100}, **asked).choices[0]
    assert typed.message.tool_calls is None
    jsonschema.validate(json.loads(typed.message.content or ""), PLACE)


def test_streamed_pieces_make_the_calls_of_the_whole_answer(sdk: openai.OpenAI) -> None:
    asked: Any = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 7,
        "max_tokens": 400,
    }
    whole = sdk.chat.completions.create(**asked).choices[0]
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in sdk.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, {"id": piece.id or "", "name": piece.function.name or "", "arguments": ""})
                call["arguments"] += piece.function.arguments or ""
    (call,) = the_calls(whole)
    assert whole.finish_reason == "tool_calls"
    assert reasons == ["tool_calls"]
    assert [(each["name"], each["arguments"]) for each in calls.values()] == [(call.function.name, call.function.arguments)]
    assert calls[0]["id"]
    check_arguments(call.function.name, call.function.arguments)
    with sdk.chat.completions.stream(**{**asked, "seed": 8}) as stream:
        helped = stream.get_final_completion().choices[0]
    (call,) = the_calls(helped)
    check_arguments(call.function.name, call.function.arguments)


class Where(pydantic.BaseModel):
    """A place, as instructor and the client's own helper describe it."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3] = 1


def test_a_class_is_a_tool_and_its_object_comes_back(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(
        model="demo",
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Where)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    ).choices[0]
    (call,) = the_calls(answer)
    assert isinstance(call.function.parsed_arguments, Where)


def test_a_cut_call_says_that_it_was_cut(sdk: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = sdk.chat.completions.create(
        model="demo", messages=QUESTION, tools=TOOLS, tool_choice=choice, max_tokens=3
    ).choices[0]
    assert answer.finish_reason == "length"


def test_a_session_keeps_calls_and_results_and_is_sent_the_new_message_alone(calm: Any, sdk: openai.OpenAI) -> None:
    session = {"session_id": "with-tools"}
    first = sdk.chat.completions.create(
        model="demo", messages=QUESTION, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=session
    ).choices[0]
    (call,) = the_calls(first)
    result: Any = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = sdk.chat.completions.create(model="demo", messages=result, tools=TOOLS, max_tokens=20, extra_body=session)
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
    stored = calm.client.sessions.GetSession(inference.GetSessionRequest(session_id="with-tools"), timeout=5).session
    roles = [inference.ROLE_USER, inference.ROLE_ASSISTANT, inference.ROLE_TOOL, inference.ROLE_ASSISTANT]
    assert [message.role for message in stored.messages] == roles
    kept = stored.messages[1].tool_calls[0]
    assert (kept.id, kept.name, kept.arguments) == (call.id, call.function.name, call.function.arguments)
    assert (stored.messages[2].tool_call_id, stored.messages[2].content) == (call.id, "sunny")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sdk: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        sdk.chat.completions.create(model="demo", messages=QUESTION, extra_body=fields)
    assert failure.value.param == param


def test_a_schema_that_cannot_be_enforced_is_refused_as_a_tool(sdk: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "f", "strict": strict, "parameters": {"type": "object", "if": {}}}}
        for strict in (False, True)
    ]
    tools[0]["function"]["name"] = "lenient"
    with pytest.raises(openai.BadRequestError) as failure:
        sdk.chat.completions.create(model="demo", messages=QUESTION, tools=tools, tool_choice="required")
    assert failure.value.param == "tools[1].function.parameters"
    assert "at #/if" in str(failure.value)
    named: Any = {"type": "function", "function": {"name": "lenient"}}
    answer = sdk.chat.completions.create(model="demo", messages=QUESTION, tools=tools, tool_choice=named, max_tokens=60)
    assert answer.choices[0].message.tool_calls


def test_the_example_of_the_page_runs(calm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    exec(compile(example.replace("http://127.0.0.1:8000", calm.cluster.http_url), str(PAGE), "exec"), {})
    name, _, arguments = capsys.readouterr().out.partition(" ")
    assert name == "weather"
    assert "city" in arguments


def test_a_node_killed_in_the_middle_of_a_call_changes_nothing(stormy: Any) -> None:
    """No token of the call is lost or repeated, and its pieces come once each, with one id."""

    def asked() -> tuple[Any, dict[str, str], str]:
        request = stormy.client.request("Count from 1 to 5.", temperature=1.0, seed=11, max_tokens=400)
        request.tools.add(name="weather", parameters=json.dumps(PLACE))
        request.tool_choice.mode, request.tool_choice.name = inference.TOOL_MODE_FUNCTION, "weather"
        call = {"id": "", "name": "", "arguments": ""}
        struck = ""

        def on_delta(delta: inference.GenerationDelta) -> None:
            nonlocal struck
            for piece in delta.tool_calls:
                assert piece.index == 0
                for part in call:
                    call[part] += getattr(piece, part)
            if strike and not struck and len(call["arguments"]) >= 4:
                struck = delta.node_id
                stormy.cluster.kill(struck, signal.SIGKILL)

        stream = stormy.client.inference.StreamChat(inference.StreamChatRequest(chat=request), timeout=60)
        return stormy.client.read(stream, on_delta=on_delta), call, struck

    strike = False
    undisturbed, expected, _ = asked()
    strike = True
    answer, call, struck = asked()
    assert struck
    assert answer.token_ids == undisturbed.token_ids
    assert len(set(answer.nodes)) == 2
    assert (call["name"], call["arguments"]) == (expected["name"], expected["arguments"])
    assert call["id"]
    assert answer.choices[0].reason == inference.FINISH_REASON_STOP
    check_arguments("weather", call["arguments"])
    stormy.start_again(struck)
