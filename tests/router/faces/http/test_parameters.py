"""What clients of vLLM and OpenAI send reaches the core, and the small routes beside the answers."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from dataclasses import replace

import httpx
import pytest
from tests.router.faces.http.conftest import open_app

from ryzanstein import errors
from ryzanstein.errors import FieldViolation
from ryzanstein.router.faces.http.gate import HttpLimits


async def asked(http, face, body):
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    return face.core.requests[-1]


async def test_sampling_parameters_of_vllm(http, face, chat):
    fields = {
        "bad_words": ["no"],
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 8.0,
        "prompt_logprobs": 0,
        "min_p": 0.5,
        "repetition_penalty": 1.5,
    }
    sampling = (await asked(http, face, chat(**fields))).sampling
    assert (sampling.bad_words, sampling.allowed_token_ids) == (("no",), (1, 2))
    assert (sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (False, True)
    assert (sampling.truncate_prompt_tokens, sampling.prompt_logprobs) == (8, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.5, 1.5)


async def test_options_of_the_chat_template(http, face, chat):
    fields = {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "high", "add_generation_prompt": False}
    request = await asked(http, face, chat(**fields, continue_final_message=True))
    assert request.prompt.template.variables == '{"thinking":true,"enable_thinking":true,"reasoning_effort":"high"}'
    assert (request.prompt.template.add_generation_prompt, request.prompt.template.continues) == (False, True)
    assert request.features == {"extended-parameters"}
    assert not (await asked(http, face, chat())).features


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "flex"}, -5),
        ({"service_tier": "priority"}, 5),
        ({"service_tier": "flex", "priority": 2}, 2),
    ],
)
async def test_a_service_tier_is_a_priority(http, face, chat, fields, priority):
    assert (await asked(http, face, chat(**fields))).priority == priority


async def test_tokenize_and_back(http):
    answer = (await http.post("/tokenize", json={"model": "echo", "prompt": "a bb", "return_token_strs": True})).json()
    assert answer == {"count": 2, "tokens": [2, 2], "max_model_len": 512, "token_strs": ["a ", "bb"]}
    answer = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})).json()
    assert answer["count"] == 1
    assert (await http.post("/detokenize", json={"tokens": [1, 2]})).json() == {"prompt": "1 2 "}
    for bad in ({}, {"prompt": "a", "messages": []}, {"messages": []}, {"prompt": 5}):
        assert (await http.post("/tokenize", json=bad)).status_code == 400
    assert (await http.post("/detokenize", json={"tokens": [-1]})).json()["error"]["param"] == "tokens[0]"


async def test_a_model_says_what_clients_ask_for(http):
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == ("echo", 512, "ryzanstein")
    assert model["created"] > 1_700_000_000
    assert (await http.get("/v1/models/echo")).json() == model


async def test_probes_version_and_metrics(http):
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/version")).json()["version"]
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "ryzanstein_router_requests_total" in answer.text


async def test_head_is_get_without_content(http):
    for path in ("/v1/models", "/health", "/openapi.json", "/metrics"):
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert (await http.head("/v1/models/none")).status_code == 404
    assert (await http.head("/v1/chat/completions")).status_code == 405


async def test_a_connection_goes_on_after_head(face):
    reader, writer = await asyncio.open_connection(*face.url.removeprefix("http://").split(":"))
    for path in (b"/v1/models", b"/healthz", b"/v1/models/none"):
        writer.write(b"HEAD " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 0" not in head.lower()
    writer.close()


async def test_embeddings_of_each_form_of_input(http, face):
    forms = ("a b", ["a b", "c"], [1, 2.0, 3], [[1], [2, 3]])
    for form in forms:
        answer = await http.post("/v1/embeddings", json={"model": "echo", "input": form})
        assert [each["embedding"][:2] for each in answer.json()["data"]] == [[0.5, -0.25]] * len(face.core.embedded[-1].inputs)
    assert [len(each.inputs) for each in face.core.embedded] == [1, 2, 1, 2]
    assert face.core.embedded[2].inputs[0].token_ids == (1, 2, 3)
    packed = await http.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"})
    assert base64.b64decode(packed.json()["data"][0]["embedding"]) == struct.pack("<3f", 0.5, -0.25, 0)
    assert (await http.post("/v1/embeddings", json={"model": "x", "input": "a"})).status_code == 404


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("inputs", "input"),
        ("inputs[70]", "input[70]"),
        ("inputs[3].text", "input[3]"),
        ("inputs[3].token_ids", "input[3]"),
        ("dimensions", "dimensions"),
    ],
)
async def test_errors_of_embeddings_name_the_field_as_the_body_has_it(http, face, field, param):
    face.core.refusal = errors.invalid(field, "is wrong")
    refused = (await http.post("/v1/embeddings", json={"input": ["a", "b"]})).json()["error"]
    assert (refused["param"], refused["message"]) == (param, f"{param}: is wrong")


async def test_an_embedding_that_is_too_long_is_named_too(http, face):
    violation = FieldViolation("inputs[1]", "must have at most 5 tokens")
    face.core.refusal = replace(errors.context_too_long(9, 0, 5), violations=(violation,))
    refused = (await http.post("/v1/embeddings", json={"input": ["a", "b"]})).json()["error"]
    assert (refused["param"], refused["code"]) == ("input[1]", "context_length_exceeded")


async def test_too_large_a_number_of_inputs_or_numbers_is_named(http):
    refused = await http.post("/v1/embeddings", json={"input": ["a"] * 2000, "dimensions": 100_000})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_whole_numbers_are_token_ids_and_fractions_are_not(http, face):
    given = {"model": "echo", "prompt": [1.0, 2], "stop_token_ids": [5.0], "allowed_token_ids": [7.0, 8]}
    assert (await http.post("/v1/completions", json=given)).status_code == 200
    request = face.core.requests[-1]
    assert (request.prompt.token_ids, request.sampling.stop_token_ids, request.sampling.allowed_token_ids) == (
        (1, 2),
        (5,),
        (7, 8),
    )
    assert all(type(each) is int for each in (*request.prompt.token_ids, *request.sampling.stop_token_ids))
    for field, value in (("prompt", [1.5]), ("stop_token_ids", [5.5]), ("allowed_token_ids", [0.5])):
        refused = await http.post("/v1/completions", json={"prompt": "a", field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{field}[0]")


async def test_a_prompt_that_is_echoed_is_never_cut_by_a_default(http, face):
    for echo in (True, False):
        await http.post("/v1/completions", json={"model": "echo", "prompt": "a", "max_tokens": 1, "echo": echo})
        assert face.core.requests[-1].never_cut == echo


async def test_a_suffix_goes_to_the_core_with_its_prompt(http, face):
    asked = {"model": "echo", "prompt": ["a", ""], "suffix": "z", "max_tokens": 1}
    assert (await http.post("/v1/completions", json=asked)).status_code == 200
    assert [(each.prompt.text, each.prompt.suffix) for each in face.core.requests[-2:]] == [("a", "z"), ("", "z")]


async def test_who_asks_for_the_socket_without_an_upgrade_is_told(http, face):
    plain = await http.get("/v1/ws")
    assert plain.status_code == 404, "there are no sockets here"
    app = open_app(face.core, metrics=False, socket_path="/v1/ws")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as other:
        described = await other.get("/v1/ws")
        assert (described.status_code, described.headers["upgrade"]) == (426, "websocket")
        assert (await other.get("/metrics")).status_code == 404


@pytest.mark.parametrize("origins", [(), ("https://a.example",)])
async def test_only_named_origins_may_read_answers(make_core, origins):
    transport = httpx.ASGITransport(open_app(make_core(), origins=origins))
    async with httpx.AsyncClient(transport=transport, base_url="http://face") as client:
        for origin, allowed in (("https://a.example", bool(origins)), ("https://b.example", False)):
            answer = await client.get("/v1/models", headers={"Origin": origin})
            assert ("access-control-allow-origin" in answer.headers) == allowed
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            }
            preflight = await client.options("/v1/chat/completions", headers=asked)
            assert (preflight.status_code == 200) == allowed


async def test_a_page_may_read_why_it_was_refused_before_its_request_was_read(make_core):
    limits = HttpLimits(max_body_bytes=16)
    transport = httpx.ASGITransport(open_app(make_core(), limits, origins=("https://a.example",)))
    async with httpx.AsyncClient(transport=transport, base_url="http://face") as client:
        refused = await client.post("/v1/chat/completions", json={"model": "x" * 100}, headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (413, "https://a.example")
    assert "Retry-After-Ms" in refused.headers["access-control-expose-headers"]


async def test_too_long_is_said_in_words_that_clients_know(http, chat, face):
    from ryzanstein import errors

    face.core.refusal = errors.context_too_long(500, 100, 512)
    error = (await http.post("/v1/chat/completions", json=chat())).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, you requested 600 tokens")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("body", [b"{", b"", b'{"model": "\xff"}', b'{"metadata": ' + b"[" * 50_000])
async def test_what_is_no_json_says_so(http, body):
    answer = await http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("effort", "own", "variables"),
    [
        ("none", None, {"enable_thinking": False}),
        ("low", None, {"enable_thinking": True, "reasoning_effort": "low"}),
        ("none", {"enable_thinking": True}, {"enable_thinking": True}),
        ("high", {"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
async def test_an_effort_says_also_whether_the_model_thinks(http, face, effort, own, variables):
    """As vLLM: most templates know only `enable_thinking`. What a client says of it itself counts."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort}
    await http.post("/v1/chat/completions", json=body | ({} if own is None else {"chat_template_kwargs": own}))
    assert json.loads(face.core.requests[-1].prompt.template.variables) == variables


async def test_what_no_engine_supports_is_named_as_the_client_wrote_it(http, face, chat):
    for field, param in (("sampling.min_p", "min_p"), ("sampling.constraint", "response_format"), ("tools", "tools")):
        face.core.refusal = errors.engine_lacks("echo", field, "llama.cpp b7200")
        answer = await http.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": f"{param}: not supported by the engine of model 'echo' (llama.cpp b7200)",
            "type": "invalid_request_error",
            "param": param,
            "code": "engine_lacks",
            "metadata": {"model": "echo", "engine": "llama.cpp b7200"},
        }
