"""What SDKs and servers put into an answer comes back in the next turn: the text of it is kept, the rest is skipped."""

from __future__ import annotations

import json

import pydantic
import pytest

from ryzanstein.generation.prompts import Message, Role, ToolCall

MODEL = "echo"
USER = {"role": "user", "content": "again"}


async def wording(http, face, *messages):
    """Returns the messages that a node would get."""
    answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [*messages, USER]})
    assert answer.status_code == 200, answer.text
    return face.core.requests[-1].prompt.messages[:-1]


class Reply(pydantic.BaseModel):
    mood: str


async def test_what_the_sdk_parsed_is_sent_back(client, face):
    text = json.dumps({"mood": "glad"})
    first = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": text}], response_format=Reply
    )
    message = first.choices[0].message
    assert message.parsed == Reply(mood="glad")
    await client.chat.completions.create(model=MODEL, messages=[message.model_dump(warnings=False), USER])
    assert face.core.requests[-1].prompt.messages[0] == Message(Role.ASSISTANT, text)


async def test_what_the_sdks_stream_collected_is_sent_back(client, face):
    async with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "one two"}]) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    for sent in (message, message.model_dump()):
        await client.chat.completions.create(model=MODEL, messages=[sent, USER])
        assert face.core.requests[-1].prompt.messages[0] == Message(Role.ASSISTANT, "one two")


SKIPPED = {
    "parsed": {"mood": "glad"},
    "annotations": [{"type": "url_citation"}],
    "provider_specific_fields": {"refusal": None},
    "finish_reason": "stop",
    "cache_control": {"type": "ephemeral"},
    "images": [],
    "audio": None,
    "function_call": None,
    "refusal": None,
    "typo": 1,
}


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_fields_that_only_their_makers_know_are_skipped(http, face, role):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    (message,) = await wording(http, face, {"role": role, "content": [part], **SKIPPED})
    assert message == Message(Role(role), "hi")


THOUGHTS = [
    {"reasoning_content": "hm", "reasoning": "other"},
    {"reasoning": "hm"},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]},
    {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "h"},
            {"type": "reasoning.summary", "summary": "m"},
            {"data": 1},
        ]
    },
    {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "output_text", "text": "a"}]},
    {"content": [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "a"}]},
]


@pytest.mark.parametrize("fields", THOUGHTS, ids=lambda value: str(value)[:32])
async def test_reasoning_is_found_wherever_a_server_puts_it(http, face, fields):
    (message,) = await wording(http, face, {"role": "assistant", "content": "a", **fields})
    assert message == Message(Role.ASSISTANT, "a", reasoning="hm")


@pytest.mark.parametrize("reasoning", [None, {"effort": "high"}, 5, []])
async def test_reasoning_that_is_no_text_is_skipped(http, face, reasoning):
    (message,) = await wording(http, face, {"role": "assistant", "content": "a", "reasoning": reasoning})
    assert message == Message(Role.ASSISTANT, "a")


SPOKEN = [
    {"content": None, "refusal": "no"},
    {"content": "", "refusal": "no"},
    {"content": [{"type": "refusal", "refusal": "no"}]},
    {"content": None, "audio": {"id": "audio_1", "transcript": "no"}},
    {"content": "no", "audio": {"id": "audio_1"}},
]


@pytest.mark.parametrize("fields", SPOKEN, ids=lambda value: str(value)[:32])
async def test_a_refusal_and_a_transcript_are_what_was_said(http, face, fields):
    (message,) = await wording(http, face, {"role": "assistant", **fields})
    assert message.content == "no"


LABELS = ["", "call_" + "x" * 4000, "functions.weather:0", "\u8c03\u7528 1", "a b"]


@pytest.mark.parametrize("label", LABELS, ids=lambda label: label[:16])
async def test_ids_and_names_are_labels(http, face, label):
    call = {"id": label, "type": "function", "function": {"name": label, "arguments": "{}", "parsed_arguments": {}}, "index": 0}
    asked = {"role": "user", "content": "x", "name": label}
    given = {"role": "tool", "content": "sun", "tool_call_id": label, "name": label}
    user, called, result = await wording(http, face, asked, {"role": "assistant", "content": None, "tool_calls": [call]}, given)
    assert (user.name, called.tool_calls) == (label, (ToolCall(label, label, "{}"),))
    assert (result.tool_call_id, result.name) == (label, label)


@pytest.mark.parametrize(
    ("arguments", "written"), [('{"a": 1', '{"a": 1'), ({"a": "\u00e9"}, '{"a":"\u00e9"}'), (None, ""), ("", "")]
)
async def test_arguments_are_kept_as_they_were_written(http, face, arguments, written):
    call = {"function": {"name": "f", "arguments": arguments}, "type": None}
    (message,) = await wording(http, face, {"role": "assistant", "tool_calls": [call]})
    assert message.tool_calls == (ToolCall("", "f", written),)


async def test_a_user_is_a_label_and_a_long_one_is_charged_under_its_digest(http, face):
    for user in ("ann smith", "\u00e9" * 100, "u" * 5000):
        answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER], "user": user})
        assert answer.status_code == 200, answer.text
        request = face.core.requests[-1]
        assert request.tenant == request.user
        assert len(request.user) <= 128
        assert (request.user == user) is (len(user) <= 128)
    other = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a", "user": "u" * 5000})
    assert (other.status_code, face.core.embedded[0].tenant) == (200, face.core.requests[-1].tenant)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_labels_of_clients_change_nothing(http, face, path):
    labels = {"client_metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "litellm_metadata": {}}
    body = {"messages": [USER]} if "chat" in path else {"input": "again"}
    answer = await http.post(path, json={"model": MODEL, **body, **labels})
    assert answer.status_code == 200, answer.text
    answer = await http.post(path, json={"model": MODEL, **body, "typo": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "typo")
