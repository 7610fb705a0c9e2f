"""What users do with a small trained chat model: questions, sessions, objects, calls, and a node that dies meanwhile."""

from __future__ import annotations

import json
import signal
from typing import Any

import httpx
import jinja2
import jsonschema
import pytest

from ryzanstein.worker.checkpoints.gguf.file import GgufFile

pytestmark = pytest.mark.timeout(300)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def wording(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def person_of(real: Any, text: str) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = real.http.chat.completions.create(
        model=real.model,
        messages=wording(f"Extract as JSON: {text}"),
        response_format=wanted,
        temperature=0,
        max_tokens=80,
    )
    assert answer.choices[0].finish_reason == "stop"
    found: dict[str, Any] = json.loads(answer.choices[0].message.content)
    jsonschema.validate(found, PERSON)
    return found


def test_it_knows_a_capital(real: Any) -> None:
    answer = real.http.chat.completions.create(
        model=real.model,
        messages=wording("What is the capital of France? Answer in one sentence."),
        temperature=0,
        max_tokens=40,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_prompt_is_that_of_the_files_template(real: Any) -> None:
    """Jinja itself renders the template of the file; the rest is the tokenizer's."""
    messages = wording("Which of these is a fruit: an apple or a chair?")
    with GgufFile.open(real.path) as file:
        template = str(file.metadata["tokenizer.chat_template"])
    text = jinja2.Environment().from_string(template).render(messages=messages, add_generation_prompt=True)
    with httpx.Client(base_url=real.cluster.http_url) as http:
        chat = http.post("/tokenize", json={"model": real.model, "messages": messages}).json()
        back = http.post("/detokenize", json={"model": real.model, "tokens": chat["tokens"]}).json()
    assert back["prompt"] == text


def test_a_session_is_the_conversation_that_a_client_would_send(real: Any) -> None:
    ask = {"model": real.model, "temperature": 0, "max_tokens": 40}
    turns = ["Give me a word for a small river.", "Use that word in a sentence."]
    in_session, sent = [], []
    for text in turns:
        sent += wording(text)
        whole = real.http.chat.completions.create(messages=sent, **ask)
        sent.append({"role": "assistant", "content": whole.choices[0].message.content})
        short = real.http.chat.completions.create(messages=wording(text), extra_body={"session_id": "real-model"}, **ask)
        assert short.usage.prompt_tokens == whole.usage.prompt_tokens
        in_session.append(short.choices[0].message.content)
    assert in_session == [message["content"] for message in sent[1::2]]


def test_it_extracts_what_a_text_says(real: Any) -> None:
    assert person_of(real, "Anna is 31 years old and lives in Rome.") == {"name": "Anna", "age": 31, "city": "Rome"}


def test_a_demanded_call_has_its_arguments(real: Any) -> None:
    answer = real.http.chat.completions.create(
        model=real.model,
        messages=wording("What is the weather in Paris?"),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=80,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("index", [0, 30, 90])
def test_a_node_killed_in_the_middle_changes_nothing(real: Any, client_of: type[Any], answers: type[Any], index: int) -> None:
    client, victims = client_of(real.cluster.router_address), list[str]()
    ask: dict[str, Any] = {"temperature": 0.8, "seed": 11, "max_tokens": 120, "logprobs": 1}
    undisturbed = client.chat("Tell me a story about a lighthouse.", **ask)

    def strike(delta: Any) -> None:
        if not victims and delta.first_index + len(delta.token_ids) > index:
            victims.append(delta.node_id)
            real.cluster.kill(delta.node_id, signal.SIGKILL)

    answer = client.chat("Tell me a story about a lighthouse.", on_delta=strike, **ask)
    client.close()
    assert len(answer.nodes) == 2
    answers.assert_equal(answer, undisturbed)
    real.cluster.restart(victims[0])
    real.cluster.wait_nodes(2)
