"""/v1/responses with the official client: created, streamed, continued, retrieved, deleted."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import httpx
import openai
import pytest
from tests.router.faces.http.conftest import open_app

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message, Role
from ryzanstein.generation.request import SamplingDefaults
from ryzanstein.generation.tokens import Started
from ryzanstein.router.faces.http.responses import shapes
from ryzanstein.router.faces.http.responses.body import ResponsesRequest
from ryzanstein.router.faces.http.responses.kept import KeptResponses
from ryzanstein.router.sessions.store import SessionBounds
from ryzanstein.router.sessions.stores.memory import MemorySessions
from ryzanstein.router.sessions.stores.sqlite import SqliteSessions
from ryzanstein.router.telemetry import RouterTelemetry


async def test_a_response_is_the_answer_in_one_item(client, face):
    answer = await client.responses.create(
        model="echo", input="one two", instructions="Be short.", max_output_tokens=9, metadata={"a": "b"}
    )
    assert (answer.status, answer.output_text, answer.object) == ("completed", "one two", "response")
    assert (answer.id, answer.output[0].id) == ("resp_g0", "msg_g0")
    assert (answer.metadata, answer.max_output_tokens) == ({"a": "b"}, 9)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (2, 2)
    request = face.core.requests[0]
    assert request.prompt.messages == (Message(Role.SYSTEM, "Be short."), Message(Role.USER, "one two"))
    assert request.sampling.max_tokens == 9


async def test_a_response_says_which_values_counted(client, face):
    face.core.served = [replace(face.core.served[0], sampling_defaults=SamplingDefaults(temperature=0.6, top_p=0.95))]
    answer = await client.responses.create(model="echo", input="one", top_p=0.5)
    assert (answer.temperature, answer.top_p) == (0.6, 0.5)
    face.core.served = []
    answer = await client.responses.create(model="echo", input="one", top_p=0.5)
    assert (answer.temperature, answer.top_p) == (1.0, 0.5)


async def test_the_events_of_a_stream(client):
    stream = await client.responses.create(model="echo", input="one two", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "one two"
    identities = {event.item_id for event in events if hasattr(event, "item_id")}
    last = events[-1].response
    assert identities == {last.output[0].id} == {events[2].item.id} == {"msg_g0"}
    assert last.usage.output_tokens == 2
    assert (await client.responses.retrieve(last.id)).output_text == "one two"


async def test_a_conversation_goes_on_from_any_response(client, face):
    first = await client.responses.create(model="echo", input="one", instructions="Only now.")
    for text in ("two", "three"):  # both continue the first
        await client.responses.create(model="echo", input=text, previous_response_id=first.id)
        wording = [(message.role, message.content) for message in face.core.requests[-1].prompt.messages]
        assert wording == [(Role.USER, "one"), (Role.ASSISTANT, "one"), (Role.USER, text)]
    await client.responses.create(model="echo", input="four", store=False)
    assert [request.kept for request in face.core.requests] == [True, True, True, False], "their pages are a conversation's"


async def test_an_item_may_refer_to_one_of_a_kept_response(client, face):
    """Vercel's ai sends the messages of earlier turns so."""
    first = await client.responses.create(model="echo", input=[{"role": "user", "content": "one"}])
    listed = (await client.responses.input_items.list(first.id)).data
    items = [{"id": listed[0].id}, {"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "two"}]
    await client.responses.create(model="echo", input=items)
    wording = [(message.role, message.content) for message in face.core.requests[-1].prompt.messages]
    assert wording == [(Role.USER, "one"), (Role.ASSISTANT, "one"), (Role.USER, "two")]


@pytest.mark.parametrize("item_id", ["msg_gone", "msg_g0_9", "resp_g0", "x", "msg_g0_in7", "fc_g0"])
async def test_an_item_that_is_not_kept_is_not_found(client, item_id):
    await client.responses.create(model="echo", input="one")
    items = [{"role": "user", "content": "two"}, {"type": "item_reference", "id": item_id}]
    with pytest.raises(openai.NotFoundError, match="no such item") as raised:
        await client.responses.create(model="echo", input=items)
    assert raised.value.param == "input[1].id"


async def test_an_item_of_another_tenant_is_not_found(client):
    first = await client.responses.create(model="echo", input="one", extra_headers={"X-Tenant-Id": "a"})
    items = [{"type": "item_reference", "id": first.output[0].id}]
    with pytest.raises(openai.NotFoundError, match="no such item"):
        await client.responses.create(model="echo", input=items, extra_headers={"X-Tenant-Id": "b"})
    assert (await client.responses.create(model="echo", input=items, extra_headers={"X-Tenant-Id": "a"})).output


async def test_items_of_calls_become_messages(client, face):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {"type": "message", "role": "user", "content": "so?"},
    ]
    await client.responses.create(model="echo", input=items)
    messages = face.core.requests[0].prompt.messages
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.USER]
    assert [call.id for call in messages[1].tool_calls] == ["c1", "c2"]
    assert (messages[2].content, messages[2].tool_call_id) == ("sun", "c1")


async def test_a_schema_constrains_the_answer(client, face):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
    answer = await client.responses.create(model="echo", input="one", text={"format": form})
    constraint = face.core.requests[0].sampling.constraint
    assert (constraint.kind.value, json.loads(constraint.text)) == ("json_schema", {"type": "integer"})
    assert answer.text.format.type == "json_schema"


async def test_an_answer_that_has_to_be_a_call_has_no_other_form(client, face):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    for choice in ("required", {"type": "function", "name": "f"}):
        await client.responses.create(model="echo", input="one", text={"format": form}, tools=tools, tool_choice=choice)
        assert face.core.requests[-1].sampling.constraint is None
        assert face.core.requests[-1].prompt.tools.must


async def test_an_answer_that_is_cut_is_incomplete(client):
    answer = await client.responses.create(model="echo", input="one two three", max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_what_is_deleted_or_not_stored_is_gone(client):
    kept = await client.responses.create(model="echo", input="one")
    unkept = await client.responses.create(model="echo", input="one", store=False)
    await client.responses.delete(kept.id)
    for response_id in (kept.id, unkept.id, "resp_none", "other"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="echo", input="two", previous_response_id=response_id)


async def test_what_is_kept_beside_a_response_is_no_response(client):
    kept = await client.responses.create(model="echo", input="one")
    alongside = f"{kept.id}.object"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await call(alongside)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="echo", input="two", previous_response_id=alongside)
    assert (await client.responses.retrieve(kept.id)).usage is not None


async def test_another_tenant_sees_nothing(client):
    kept = await client.responses.create(model="echo", input="one", extra_headers={"X-Tenant-Id": "a"})
    assert (await client.responses.retrieve(kept.id, extra_headers={"X-Tenant-Id": "a"})).output_text == "one"
    for headers in ({}, {"X-Tenant-Id": "b"}):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(kept.id, extra_headers=headers)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="echo", input="x", previous_response_id=kept.id, extra_headers=headers)


async def test_a_running_response_is_cancelled(client, face, eventually):
    face.core.pause_at = 1
    stream = await client.responses.create(model="echo", input="one two", stream=True)
    events = aiter(stream)
    first = await anext(events)
    cancelled = await client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled"
    rest = [event async for event in events]
    assert (rest[-1].type, rest[-1].response.status) == ("response.incomplete", "cancelled")
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel(first.response.id)


async def test_a_failure_ends_the_stream_as_failed(client, face):
    face.core.fail_at = 1
    stream = await client.responses.create(model="echo", input="one two", stream=True)
    events = [event async for event in stream]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message == "the script says so"


def response(response_id, **fields):
    return {"id": response_id, "model": "echo", **fields}


async def test_all_of_a_kept_response_counts():
    kept = KeptResponses(MemorySessions(SessionBounds(), lambda _: None), RouterTelemetry())
    wording = (Message(Role.USER, "x"), Message(Role.ASSISTANT, "y"))
    for i in range(20):  # what a client sent comes back with its response
        await kept.keep("", response(f"resp_{i}", instructions="x" * 1_000_000), wording)
    assert "instructions" in await kept.retrieve("", "resp_19")
    assert await kept.retrieve("", "resp_0") | {"output": []} == shapes.begun(
        Started("0", "", "", 0), ResponsesRequest(input="")
    ) | {"status": "completed", "output": []}


async def test_a_response_that_another_router_deleted_is_not_found():
    sessions = MemorySessions(SessionBounds(), lambda _: None)
    kept, other = (KeptResponses(sessions, RouterTelemetry()) for _ in range(2))
    await kept.keep("t", response("resp_1"), (Message(Role.USER, "x"), Message(Role.ASSISTANT, "y")))
    with pytest.raises(RyzansteinError):
        await other.delete("", "resp_1")  # another tenant's
    assert await kept.retrieve("t", "resp_1") == response("resp_1")
    await other.delete("t", "resp_1")
    with pytest.raises(RyzansteinError) as refused:
        await kept.retrieve("t", "resp_1")
    assert refused.value.code is Code.NOT_FOUND


async def test_a_client_that_leaves_cancels_its_response(client, face, eventually):
    face.core.pause_at = 1
    stream = await client.responses.create(model="echo", input="one two", stream=True)
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: face.core.cancelled == ["g0"], "cancelled")
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "name": "c"}], "tool_choice": {"type": "custom", "name": "c"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include[1]"),
        ({"conversation": "c"}, "conversation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"temperature": 3}, "temperature"),
        ({"typo": 1}, "typo"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"typo": True}}, "stream_options.typo"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.long
async def test_what_is_not_supported_is_refused_by_name(http, face, fields, param):
    answer = await http.post("/v1/responses", json={"model": "echo", "input": "x", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert face.core.requests == []


async def test_another_router_of_the_same_store_has_the_whole_response(face):
    sessions = MemorySessions(SessionBounds(), lambda _: None)
    apps = [open_app(face.core, sessions=sessions) for _ in range(2)]
    one, other = (httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") for app in apps)
    made = (await one.post("/v1/responses", json={"model": "echo", "input": "one two", "metadata": {"a": "b"}})).json()
    assert (await other.get(f"/v1/responses/{made['id']}")).json() == made
    assert made["usage"]["output_tokens"] == 2
    assert (await other.delete(f"/v1/responses/{made['id']}")).status_code == 200
    assert (await one.get(f"/v1/responses/{made['id']}")).status_code == 404
    assert not (await sessions.list()).sessions, "its object is gone, too"


async def test_twelve_chained_turns_are_stored_once_and_sent_whole(face, tmp_path):
    sessions = await SqliteSessions.open(tmp_path / "s.db", SessionBounds(), lambda _: None)
    app = open_app(face.core, sessions=sessions)
    previous = None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for turn in range(12):
            body = {"model": "echo", "input": f"turn {turn}", "previous_response_id": previous, "stream": bool(turn % 2)}
            answer = await client.post("/v1/responses", json=body)
            last = answer.text.strip().splitlines()[-1].removeprefix("data: ") if turn % 2 else answer.text
            previous = (json.loads(last)["response"] if turn % 2 else json.loads(last))["id"]
    await sessions.close()
    assert len(face.core.requests[-1].prompt.messages) == 23
    with closing(sqlite3.connect(tmp_path / "s.db")) as db:
        (stored,) = db.execute("SELECT count(*) FROM messages WHERE role != 'continues'").fetchone()
    assert stored == 12 * 3, "question, answer and object; with whole conversations: 168"


async def test_a_request_that_is_repeated_with_its_key_is_keyed_with_what_it_continues(http, face):
    first = (await http.post("/v1/responses", json={"model": "echo", "input": "one"})).json()
    body = {"model": "echo", "input": "two", "previous_response_id": first["id"]}
    for _ in range(2):
        assert (await http.post("/v1/responses", json=body, headers={"Idempotency-Key": "k"})).status_code == 200
    await http.post("/v1/responses", json={"model": "echo", "input": "two"}, headers={"Idempotency-Key": "k"})
    same, again, other = (request.key for request in face.core.requests[-3:])
    assert same == again
    assert same.name == other.name
    assert same.body != other.body


CODEX = {
    "model": "echo",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: on"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "ls"}],
            "encrypted_content": None,
        },
        {"type": "function_call", "id": "fc_1", "name": "exec", "arguments": "{}", "call_id": "call_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now"}]},
    ],
    "tools": [
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
        },
        {
            "type": "function",
            "name": "exec",
            "description": "d",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", "name": "y"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
}


async def test_the_request_of_a_coding_agent_is_answered_without_the_tools_that_only_openai_runs(http, face):
    answer = await http.post("/v1/responses", json=CODEX)
    assert answer.status_code == 200, answer.text
    assert [tool["name"] for tool in answer.json()["tools"]] == ["exec"], "the answer says what was offered"
    prompt = face.core.requests[0].prompt
    assert [tool.name for tool in prompt.tools.offered] == ["exec"]
    wording = [(m.role.value, m.content, [c.name for c in m.tool_calls], m.reasoning) for m in prompt.messages[3:8]]
    assert wording == [
        ("assistant", "", ["exec"], "ls"),
        ("tool", "a.py", [], ""),
        ("assistant", "", ["apply_patch"], ""),
        ("tool", "done", [], ""),
        ("assistant", "no", [], ""),
    ]
    assert json.loads(prompt.messages[5].tool_calls[0].arguments) == {"input": "*** Begin"}


async def test_the_input_of_a_response_is_listed_in_pages(client):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    first = await client.responses.create(model="echo", input=[{"role": "user", "content": "one"}, call, output])
    second = await client.responses.create(model="echo", input="two", previous_response_id=first.id)
    items = [item async for item in client.responses.input_items.list(first.id, order="asc", limit=1)]
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert (items[0].content[0].text, items[2].output) == ("one", "sun")
    newest = (await client.responses.input_items.list(second.id)).data
    assert [item.type for item in newest] == ["message", "message", "function_call_output", "function_call", "message"]
    assert len({item.id for item in newest}) == 5
    for refused in ({"after": "nothing"}, {"limit": 0}, {"limit": 101}):
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(first.id, **refused)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_none")
