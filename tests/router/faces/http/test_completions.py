"""/v1/completions as OpenAI and vLLM have it: lists of prompts, echo, the best of several answers."""

from __future__ import annotations

import json

import pytest

from ryzanstein.generation.prompts import TextPrompt, TokenPrompt


async def complete(http, **fields):
    response = await http.post("/v1/completions", json={"model": "echo", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_each_prompt_of_a_list_is_answered_in_its_place(http, face):
    answer = await complete(http, prompt=["a b", "c d e", "f"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["a b", "a b", "c d e", "c d e", "f", "f"]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12
    assert [request.prompt for request in face.core.requests] == [TextPrompt("a b"), TextPrompt("c d e"), TextPrompt("f")]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1, 2]], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
        (["a"], [TextPrompt("a")]),
    ],
)
async def test_prompts_may_be_texts_or_tokens(http, face, given, prompts):
    await complete(http, prompt=given)
    assert [request.prompt for request in face.core.requests] == prompts


async def test_when_one_prompt_fails_the_others_are_cancelled(http, face):
    face.core.pause_at = 1
    answer = await http.post("/v1/completions", json={"model": "echo", "prompt": ["a b", "c d"], "stream": False, "n": 17})
    assert answer.status_code == 400
    face.core.fail_at = 0
    answer = await http.post("/v1/completions", json={"model": "echo", "prompt": ["a b", "c d"]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_echo_puts_the_prompt_in_front(http):
    (choice,) = (await complete(http, prompt="one two", echo=True, max_tokens=1))["choices"]
    assert choice["text"] == "one twoone "
    (choice,) = (await complete(http, prompt=[5, 6], echo=True, max_tokens=1))["choices"]
    assert choice["text"] == "5 6 5 "


async def test_echo_with_logprobs_has_those_of_the_prompt_first(http, face):
    (choice,) = (await complete(http, prompt="one two", echo=True, logprobs=1, max_tokens=1))["choices"]
    assert face.core.requests[0].sampling.prompt_logprobs == 1
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["one ", "two", "one "]
    assert logprobs["token_logprobs"] == [None, -1.5, -0.5]
    assert logprobs["top_logprobs"] == [None, {"likely": -0.25}, {"one ": -0.5}]
    assert logprobs["text_offset"] == [0, 4, 7]


async def test_the_prompt_alone_can_be_scored(http, face):
    answer = await complete(http, prompt="one two", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("one two", [None, -1.5])
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 0}
    assert face.core.requests[0].sampling.max_tokens == 1


async def test_prompt_logprobs_are_shown_as_vllm_shows_them(http, chat):
    (choice,) = (await complete(http, prompt="one two", prompt_logprobs=1))["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["1"] == {"logprob": -1.5, "rank": None, "decoded_token": "two"}
    assert second["7"] == {"logprob": -0.25, "rank": 1, "decoded_token": "likely"}
    answer = (await http.post("/v1/chat/completions", json=chat("one two", prompt_logprobs=0))).json()
    assert [row if row is None else list(row) for row in answer["prompt_logprobs"]] == [None, ["1"]]


async def test_the_best_answers_are_shown(http, face):
    answer = await complete(http, prompt="one two", best_of=4, n=2)
    assert face.core.requests[0].sampling.n == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 8, "all of them were generated"


async def test_several_prompts_are_streamed_as_one(client, face):
    """Chunks of all prompts as they come; each choice has its own number, the stream one id."""
    stream = await client.completions.create(
        model="echo", prompt=["a b", "c d e"], n=2, echo=True, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    ends, chunks = [], [chunk async for chunk in stream]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == {0: "a ba b", 1: "a ba b", 2: "c d ec d e", 3: "c d ec d e"}
    assert sorted(ends) == [0, 1, 2, 3]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == 10


async def test_a_prompt_that_fails_in_the_middle_ends_the_stream_and_the_others(http, face, eventually):
    face.core.fail_at = 1
    body = {"model": "echo", "prompt": ["a b", "c"], "stream": True}
    text = (await http.post("/v1/completions", json=body)).text
    assert text.rstrip().splitlines()[-2] == "event: error"
    assert "[DONE]" not in text


async def test_a_client_that_leaves_a_stream_of_several_prompts_cancels_them(http, face, eventually):
    face.core.pause_at = 1
    body = {"model": "echo", "prompt": ["a b", "c d"], "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())
    await eventually(lambda: sorted(face.core.cancelled) == ["g0", "g1"], "both are cancelled")
    await eventually(lambda: face.core.readers == 0, "and nobody reads")


async def test_a_stream_of_no_token_has_the_prompt_alone(http):
    options = {"echo": True, "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/completions", json={"prompt": ["one two", "three"], **options})
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-2]]
    chunks = [json.loads(event) for event in events]
    texts = ["".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i) for i in range(2)]
    assert texts == ["one two", "three"]
    assert chunks[-1]["usage"]["completion_tokens"] == 0
