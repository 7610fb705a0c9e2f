"""Each mistake is a 400 that names its field, and nothing of it reaches the core."""

from __future__ import annotations

import json

import httpx
import pytest
from tests.router.faces.http.conftest import open_app

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def core(make_core):
    return make_core()


@pytest.fixture
async def http(core):
    """The application without a server: what is refused here never comes to depend on one."""
    transport = httpx.ASGITransport(open_app(core))
    async with httpx.AsyncClient(transport=transport, base_url="http://face") as client:
        yield client
    await core.close()


def message(**fields):
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(name):
    return CALL | {"function": {"name": name, "arguments": "{}"}}


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


# What stands beside a good request, and the parameter that the error names.
CHAT = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2**32}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [2**32]}, "stop_token_ids[0]"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**32): 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"typo": True}}, "stream_options.typo"),
    ({"user": "u" * 16_385}, "user"),
    ({"priority": 11}, "priority"),
    ({"priority": -11}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"priority": True}, "priority"),
    ({"session_id": "s" * 129}, "session_id"),
    ({"model": "m" * 129}, "model"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool("f g")]}, "tools[0].function.name"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
    ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", parameters={"a": deep(65)})]}, "tools[0].function.parameters"),
    ({"tools": [tool("f", typo=1)]}, "tools[0].function.typo"),
    ({"tools": [tool("f", description="d" * 300_000)]}, "tools"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool("f")], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
    ({"tools": [tool("f")], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
    ({"guided_json": "x" * (2**18 + 1)}, "guided_json"),
    ({"guided_json": "x" * (2**17 + 1)}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
    ({"guided_choice": ["a"] * 1025}, "guided_choice"),
    ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"echo": True}, "echo"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"bad_words": ["x" * 65]}, "bad_words"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b"),
    ({"chat_template_kwargs": {"x": "y" * 5000}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False, "session_id": "s"}, "continue_final_message"),
    ({"max_token": 5}, "max_token"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": ["hi"]}, "messages[0]"),
    (message(role="function", name="f"), "messages[0].role"),
    (message(role="tool", tool_call_id="x" * 16_385), "messages[0].tool_call_id"),
    (message(role="user", tool_call_id="x"), "messages[0].tool_call_id"),
    (message(role="user", reasoning_content="x"), "messages[0].reasoning_content"),
    (message(role="User"), "messages[0].role"),
    (message(role=""), "messages[0].role"),
    (message(role=3), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=5), "messages[0].content"),
    (message(content=[{"type": "image_url", "image_url": {"url": "u"}}]), "messages[0].content[0].type"),
    (message(content=[{"type": "text", "text": "a"}, {"type": "input_audio"}]), "messages[0].content[1].type"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"text": "a"}]), "messages[0].content[0].type"),
    (message(content=["a"]), "messages[0].content[0]"),
    (message(name="\u00e9" * 8_193), "messages[0].name"),
    (message(role="assistant", tool_calls=[{"id": "1"}]), "messages[0].tool_calls[0].function"),
    (message(role="assistant", tool_calls=[{"id": "1", "type": "custom"}]), "messages[0].tool_calls[0].type"),
    (message(role="assistant", tool_calls=[CALL | {"id": "c" * 16_385}]), "messages[0].tool_calls[0].id"),
    (message(role="assistant", tool_calls=[calling("f" * 16_385)]), "messages[0].tool_calls[0].function.name"),
    (
        message(role="assistant", tool_calls=[CALL | {"function": {"name": "f", "arguments": [1]}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (message(role="assistant", tool_calls=[CALL] * 129), "messages[0].tool_calls"),
    (message(role="user", tool_calls=[CALL]), "messages[0].tool_calls"),
    (message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
    (message(role="assistant", content=None, audio={"id": "audio_1"}), "messages[0].audio"),
    (message(role="user", content=[{"type": "thinking", "thinking": "t"}]), "messages[0].content[0].type"),
]


def check(response, param):
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"]
    assert len(error["message"]) <= 512


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=lambda value: str(value)[:48])
@pytest.mark.long
async def test_a_bad_chat_request(http, core, fields, param):
    body = json.dumps({"model": "echo", "messages": MESSAGES, **fields})
    check(await http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}), param)
    assert core.requests == []


COMPLETIONS = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**32]}, "prompt[0]"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": [1], "suffix": "z"}, "suffix"),
    ({"prompt": "a", "suffix": "z", "echo": True}, "echo"),
    ({"prompt": "a", "suffix": "z", "keep_prompt_head": 1}, "keep_prompt_head"),
    ({"prompt": "a", "echo": True, "keep_prompt_head": 1}, "echo"),
    ({"prompt": "a", "echo": True, "truncate_prompt_tokens": 4}, "echo"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 4}, "prompt"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "a", "best_of": 17}, "best_of"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "session_id": "s"}, "session_id"),
    ({"prompt": "a", "messages": MESSAGES}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=lambda value: str(value)[:48])
async def test_a_bad_completion_request(http, core, fields, param):
    check(await http.post("/v1/completions", json={"model": "echo", **fields}), param)
    assert core.requests == []


@pytest.mark.parametrize(
    ("value", "code"), [("NaN", "invalid_json"), ("-Infinity", "invalid_json"), ("1e999", "invalid_argument")]
)
@pytest.mark.parametrize("field", ["temperature", "logit_bias"])
async def test_numbers_that_are_not_finite_are_refused(http, core, field, value, code):
    raw = f'{{"5": {value}}}' if field == "logit_bias" else value
    body = f'{{"model": "echo", "messages": {json.dumps(MESSAGES)}, "{field}": {raw}}}'
    response = await http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert error["param"] == (field if code == "invalid_argument" else None)
    assert core.requests == []


BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"5",
    b'"text"',
    b"\xff\xfe",
    b'{"messages": [}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"n": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
async def test_a_body_that_is_no_json_object(http, core, body, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    response = await http.post("/v1/chat/completions", content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert core.requests == []


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "1" * 30, "86400001", "\u0661"])
async def test_a_bad_timeout_header(http, core, chat, value):
    response = await http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Timeout-Ms": value.encode("utf-8")})
    check(response, "X-Request-Timeout-Ms")
    assert core.requests == []


@pytest.mark.parametrize("value", ["t" * 129, "two words", "t\u00e9"])
async def test_a_bad_tenant_header(http, core, chat, value):
    response = await http.post("/v1/chat/completions", json=chat(), headers={"X-Tenant-Id": value.encode("utf-8")})
    check(response, "x-tenant-id")
    assert core.requests == []


async def test_contradicting_sessions(http, core, chat):
    response = await http.post("/v1/chat/completions", json=chat(session_id="a"), headers={"X-Session-Id": "b"})
    check(response, "session_id")
    assert core.requests == []


HARMLESS = [
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
    {"tools": [tool("f", parameters=None, description=None, strict=None)], "tool_choice": "auto"},
    {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto", "store": False},
    {"temperature": None, "stop": None, "tools": None, "stream": None, "stream_options": None, "logit_bias": None},
    {"metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "reasoning_effort": None},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
    {"top_k": -1, "min_p": 0, "top_logprobs": 0, "stop": []},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": None, "refusal": None}, *MESSAGES]},
    message(name="ann", tool_calls=None, tool_call_id=None, reasoning_content=None),
    message(role="assistant", tool_calls=[CALL | {"index": 0}], reasoning_content="hm"),
    message(role="tool", tool_call_id="call_1", content=[{"type": "text", "text": "hi"}]),
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"max_tokens": 5.0, "n": 1.0, "top_k": 2.0, "seed": 7.0, "priority": 1.0, "top_logprobs": 0.0},
    {"model": None, "store": True, "service_tier": "flex", "chat_template_kwargs": {}, "bad_words": []},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=lambda value: str(value)[:48])
async def test_fields_that_ask_for_nothing_are_taken(http, fields):
    response = await http.post("/v1/chat/completions", json={"model": "echo", "messages": MESSAGES, **fields})
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "hi")


async def test_an_unknown_model_is_not_found_and_says_its_name(http, chat):
    response = await http.post("/v1/chat/completions", json={**chat(), "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "no such model: 'gpt-9'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/v1/embedding", 404), ("GET", "/v1/chat/completions", 405), ("PUT", "/v1/models", 405)],
)
async def test_what_does_not_exist_has_an_openai_body(http, method, path, status):
    response = await http.request(method, path)
    assert (response.status_code, response.json()["error"]["type"]) == (status, "invalid_request_error")
    assert path in response.json()["error"]["message"]


async def test_the_schema_of_the_api_can_be_read(http):
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/generations/{response_id}/events"} <= paths.keys()
