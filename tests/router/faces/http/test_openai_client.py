"""The official client, unchanged, against the real server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import Message, Role, TextPrompt, TokenPrompt

USER = [{"role": "user", "content": "one two three"}]


async def test_an_answer(client, face):
    answer = await client.chat.completions.create(model="echo", messages=USER)
    assert answer.id == "chatcmpl-g0"
    assert (answer.object, answer.model, answer.system_fingerprint) == ("chat.completion", "echo", None)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "one two three")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_a_placeholder_of_a_key_is_ignored_where_there_are_no_keys(http, header):
    headers = [(header, "Bearer EMPTY" if header == "authorization" else "EMPTY"), ("x-api-key", "another")]
    answer = await http.post("/v1/chat/completions", json={"model": "echo", "messages": USER}, headers=headers)
    assert answer.status_code == 200


async def test_a_stream_gives_the_same_text_as_the_whole_answer(client):
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-g0"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_comes_last_when_asked_for(client):
    stream = await client.chat.completions.create(
        model="echo", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 3)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_several_choices(client, face):
    answer = await client.chat.completions.create(model="echo", messages=USER, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, "one two three") for i in range(3)]
    assert answer.usage.completion_tokens == 9
    assert face.core.requests[0].sampling.n == 3


async def test_several_choices_in_a_stream(client):
    stream = await client.chat.completions.create(model="echo", messages=USER, n=2, stream=True)
    texts, roles, ends = ["", ""], [0, 0], [0, 0]
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        ends[choice.index] += choice.finish_reason == "stop"
    assert (texts, roles, ends) == (["one two three"] * 2, [1, 1], [1, 1])


async def test_logprobs(client, face):
    answer = await client.chat.completions.create(model="echo", messages=USER, logprobs=True, top_logprobs=2)
    rows = answer.choices[0].logprobs.content
    assert [row.token for row in rows] == ["one ", "two ", "three"]
    assert rows[0].logprob == -0.5
    assert bytes(rows[0].bytes) == b"one "
    assert [(top.token, top.logprob) for top in rows[0].top_logprobs] == [("one ", -0.5), ("alternative", -9999.0)]
    assert face.core.requests[0].sampling.logprobs == 2


async def test_logprobs_in_a_stream(client):
    stream = await client.chat.completions.create(model="echo", messages=USER, logprobs=True, stream=True)
    rows = [row async for chunk in stream for row in (chunk.choices[0].logprobs or _NOTHING).content]
    assert [(row.token, row.top_logprobs) for row in rows] == [("one ", []), ("two ", []), ("three", [])]


class _NOTHING:
    content = ()


async def test_every_parameter_arrives(client, face):
    await client.chat.completions.create(
        model="echo",
        messages=USER,
        temperature=0,
        top_p=0.5,
        n=2,
        stop=["a", "b"],
        max_completion_tokens=7,
        presence_penalty=-1,
        frequency_penalty=1.5,
        logit_bias={"5": -100, "17": 2.5},
        seed=-1,
        user="u",
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "session_id": "s",
            "priority": -2,
        },
    )
    (request,) = face.core.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.stop) == (0, 0.5, 2, ("a", "b"))
    assert (sampling.max_tokens, sampling.presence_penalty, sampling.frequency_penalty) == (7, -1, 1.5)
    assert (sampling.logit_bias, sampling.seed) == (((5, -100), (17, 2.5)), 2**64 - 1)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.1, 1.2)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (9,), True)
    assert (request.user, request.session_id, request.deadline) == ("u", "s", None)
    assert (request.priority, request.tenant) == (-2, "u")


async def test_a_header_names_the_tenant(client, face):
    await client.chat.completions.create(model="echo", messages=USER, user="u", extra_headers={"X-Tenant-Id": "acme"})
    assert face.core.requests[0].tenant == "acme"


async def test_what_is_left_out_is_as_openai_has_it(client, face):
    await client.chat.completions.create(model="echo", messages=USER)
    sampling = face.core.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.max_tokens) == (1.0, 1.0, 1, None)
    assert (sampling.seed, sampling.logprobs, sampling.stop) == (None, None, ())


async def test_roles_parts_and_messages_that_are_sent_back(client, face):
    answer = await client.chat.completions.create(model="echo", messages=USER)
    await client.chat.completions.create(
        model="echo",
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            answer.choices[0].message,
            {"role": "user", "content": "last"},
        ],
    )
    assert face.core.requests[1].prompt.messages == (
        Message(Role.SYSTEM, "s"),
        Message(Role.SYSTEM, "d"),
        Message(Role.USER, "a\nb"),
        Message(Role.ASSISTANT, "one two three"),
        Message(Role.USER, "last"),
    )


async def test_a_session_can_be_named_in_a_header(client, face):
    await client.chat.completions.create(model="echo", messages=USER, extra_headers={"X-Session-Id": "h"})
    assert face.core.requests[0].session_id == "h"


async def test_completions_of_text_and_of_token_ids(client, face):
    answer = await client.completions.create(model="echo", prompt="a b c", max_tokens=2, logprobs=1)
    assert (answer.id, answer.object, answer.choices[0].text) == ("cmpl-g0", "text_completion", "a b ")
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["a ", "b "], [-0.5, -0.5], [0, 2])
    assert logprobs.top_logprobs == [{"a ": -0.5}, {"b ": -0.5}]
    answer = await client.completions.create(model="echo", prompt=[7, 8])
    assert answer.choices[0].text == "7 8 "
    assert [request.prompt for request in face.core.requests] == [TextPrompt("a b c"), TokenPrompt((7, 8))]
    assert face.core.requests[1].sampling.max_tokens == 16


async def test_a_completion_stream(client):
    stream = await client.completions.create(model="echo", prompt=["a b c"], stream=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a b c"
    assert [o for chunk in chunks if chunk.choices[0].logprobs for o in chunk.choices[0].logprobs.text_offset] == [0, 2, 4]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(client):
    (model,) = (await client.models.list()).data
    assert (model.id, model.owned_by, model.context_length) == ("echo", "ryzanstein", 512)
    assert (await client.models.retrieve("echo")).id == "echo"
    with pytest.raises(openai.NotFoundError) as failure:
        await client.models.retrieve("org/other")
    assert failure.value.code == "model_not_found"


def ask_and_stream(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        whole = client.chat.completions.create(model="echo", messages=USER).choices[0].message.content
        with client.chat.completions.create(model="echo", messages=USER, stream=True) as stream:
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)


async def test_the_synchronous_client(face):
    assert await asyncio.to_thread(ask_and_stream, face.url) == ("one two three", "one two three")


REFUSALS = [
    (errors.queue_full(7, 7, 1.5), openai.RateLimitError, 429, "queue_full", None),
    (errors.context_too_long(500, 100, 512), openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    (errors.not_found("model", "x"), openai.NotFoundError, 404, "model_not_found", "model"),
    (errors.already_exists("session", "s"), openai.ConflictError, 409, "session_exists", None),
    (errors.no_nodes("echo", "all died"), openai.InternalServerError, 503, "no_nodes", None),
    (errors.draining("node-0"), openai.InternalServerError, 503, "draining", None),
    (errors.deadline_exceeded(), openai.InternalServerError, 504, "deadline_exceeded", None),
    (errors.cancelled(), openai.APIStatusError, 499, "cancelled", None),
    (errors.failed_precondition("BUSY", "busy"), openai.BadRequestError, 400, "busy", None),
    (
        RyzansteinError("key?", errors.Code.UNAUTHENTICATED, "NO_KEY"),
        openai.AuthenticationError,
        401,
        "no_key",
        None,
    ),
    (
        RyzansteinError("no", errors.Code.PERMISSION_DENIED, "FORBIDDEN"),
        openai.PermissionDeniedError,
        403,
        "forbidden",
        None,
    ),
    (errors.internal("a bug"), openai.InternalServerError, 500, "internal", None),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[0].reason)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.long
async def test_a_refusal_is_the_clients_own_exception(client, face, refusal, stream):
    error, kind, status, code, param = refusal
    face.core.refusal = error
    with pytest.raises(kind) as failure:
        await client.chat.completions.create(model="echo", messages=USER, stream=stream)
    assert (failure.value.status_code, failure.value.code, failure.value.param) == (status, code, param)
    assert failure.value.body["message"] == error.message


async def test_the_client_learns_when_to_come_back(client, face):
    face.core.refusal = errors.queue_full(7, 7, 1.2)
    with pytest.raises(openai.RateLimitError) as failure:
        await client.chat.completions.create(model="echo", messages=USER)
    assert failure.value.response.headers["retry-after"] == "2"
    assert failure.value.response.headers["retry-after-ms"] == "1200"
    assert failure.value.type == "rate_limit_error"


async def test_an_error_before_the_first_token_of_a_stream_has_its_status(client, face):
    face.core.fail_at, face.core.error = 0, errors.no_nodes("echo", "all died")
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="echo", messages=USER, stream=True)
    assert failure.value.status_code == 503


async def read_into(seen, stream):
    async for chunk in stream:
        seen.append(chunk.choices[0].delta.content or "")


async def test_an_error_in_mid_stream_is_an_exception_after_the_tokens(client, face):
    face.core.fail_at, face.core.error = 2, errors.no_nodes("echo", "all died")
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True)
    seen = []
    with pytest.raises(openai.APIError, match="all died") as failure:
        await read_into(seen, stream)
    assert ("".join(seen), failure.value.code) == ("one two ", "no_nodes")


async def test_a_bug_in_mid_stream_says_nothing_of_itself(client, face):
    face.core.fail_at, face.core.error = 1, ZeroDivisionError("secret")
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="internal error, request") as failure:
        async for _ in stream:
            pass
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_before_the_answer_is_a_500_with_the_request_id(client, face, stream, eventually):
    face.core.refusal = ZeroDivisionError("secret")
    with pytest.raises(openai.InternalServerError) as failure:
        await client.chat.completions.create(model="echo", messages=USER, stream=stream)
    assert failure.value.response.headers["x-request-id"] in failure.value.message
    assert "secret" not in failure.value.message
    await eventually(lambda: face.requests_with(500) == 1, "counted")


async def test_a_client_that_stops_reading_a_stream_is_detached_not_cancelled(client, face, eventually):
    face.core.pause_at = 2
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True)
    await anext(aiter(stream))
    assert face.core.readers == 1
    await stream.close()
    await eventually(lambda: face.core.readers == 0, "the reader detached")
    assert face.core.cancelled == []
    await eventually(lambda: face.requests_with(499) == 1, "counted as a client that went away")


async def test_a_client_that_gives_up_on_a_whole_answer_cancels_it(client, face, eventually):
    face.core.pause_at = 2
    asking = asyncio.create_task(client.chat.completions.create(model="echo", messages=USER))
    await eventually(lambda: face.core.readers == 1, "the answer is being collected")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: face.core.cancelled == ["g0"], "the generation was cancelled")
    await eventually(lambda: face.requests_with(499) == 1, "counted as a client that went away")


async def test_a_client_that_leaves_before_it_knows_the_id_of_its_stream_cancels_it(client, face, eventually):
    face.core.pause_at = 0
    asking = asyncio.create_task(client.chat.completions.create(model="echo", messages=USER, stream=True))
    await eventually(lambda: face.core.readers == 1, "the stream waits for its start")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: face.core.cancelled == ["g0"], "the generation was cancelled")


async def test_a_cancelled_generation_says_so(client, face):
    face.core.pause_at = 1
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True)
    chunks = aiter(stream)
    await anext(chunks)
    await face.core.cancel("g0")
    reasons = [chunk.choices[0].finish_reason async for chunk in chunks]
    assert reasons[-1] == "cancelled"


async def test_a_stream_ends_with_its_reader_when_the_client_said_so(client, face, eventually):
    face.core.pause_at = 2
    choice = {"X-Cancel-On-Disconnect": "true"}
    stream = await client.chat.completions.create(model="echo", messages=USER, stream=True, extra_headers=choice)
    await anext(aiter(stream))
    await stream.close()
    await eventually(lambda: face.core.cancelled == ["g0"], "the generation was cancelled")
    assert face.core.readers == 0


@pytest.mark.parametrize("choice", [{"X-Run-Detached": "true"}, {"X-Cancel-On-Disconnect": "False"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_detached_generation_runs_on_without_its_client(client, face, eventually, choice, stream):
    face.core.pause_at = 0
    asking = asyncio.create_task(
        client.chat.completions.create(model="echo", messages=USER, stream=stream, extra_headers=choice)
    )
    await eventually(lambda: face.core.readers == 1, "the answer is being read")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: face.requests_with(499) == 1, "counted as a client that went away")
    assert face.core.cancelled == []
    assert [request.detached for request in face.core.requests] == [True]


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"X-Cancel-On-Disconnect": "1"}, "x-cancel-on-disconnect"),
        ({"X-Run-Detached": "yes"}, "x-run-detached"),
        ({"X-Cancel-On-Disconnect": "true", "X-Run-Detached": "true"}, "x-run-detached"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_for_disconnects_that_makes_no_sense_is_refused(client, face, choice, field, stream):
    with pytest.raises(openai.BadRequestError) as failure:
        await client.chat.completions.create(model="echo", messages=USER, stream=stream, extra_headers=choice)
    assert failure.value.param == field
    assert face.core.requests == []
