"""An answer that a server streams: each token once, none missing, none too many, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.worker.engines.recorded import (
    DONE,
    INCREMENTAL,
    STREAMS,
    TOKENS,
    asked,
    llama_end,
    llama_event,
    served,
    trtllm_event,
    vllm_event,
    vllm_usage,
)
from tests.worker.engines.stub_server import Exchange, Stub, stub_server

from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import ComputedPart
from ryzanstein.worker.engines.remote.dialects.sglang import SglangDialect
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, EngineRefused, EngineUnreachable

PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llama.cpp": "/completion", "tensorrt-llm": "/v1/completions"}


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with stub_server() as stub:
        yield stub


@pytest.fixture
async def client(stub: Stub) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineAddress.parse(stub.address), silence_s=5.0)
    yield client
    await client.close()


async def parts_of(client: EngineClient, name: str, **more: Any) -> list[ComputedPart]:
    async with aclosing(computed(client, served(name), asked(**more))) as parts:
        return [part async for part in parts]


def ids(parts: list[ComputedPart]) -> list[int]:
    return [token.token_id for part in parts for token in part.tokens]


def end(parts: list[ComputedPart]) -> tuple[str, int | None, int | None]:
    assert [part.finish for part in parts[:-1]] == [""] * (len(parts) - 1), "the last part alone has an end"
    return parts[-1].finish, parts[-1].stop_token, parts[-1].cached_tokens


@pytest.mark.parametrize(("name", "events"), [*STREAMS.items(), ("sglang", INCREMENTAL)])
async def test_a_recorded_stream_is_an_answer(stub: Stub, client: EngineClient, name: str, events: list[object]) -> None:
    stub.streams(PATHS[name], *events)
    for _ in range(2):
        parts = await parts_of(client, name)
        assert (ids(parts), end(parts)) == (TOKENS, ("stop", 2, 2))
    assert stub.connections == 1, "the connection is used again"


async def test_an_answer_that_is_full_ends_with_length(stub: Stub, client: EngineClient) -> None:
    stub.streams(PATHS["vllm"], vllm_event([17, 18], 2), vllm_event([19], 3, "length"), vllm_usage(3), DONE)
    parts = await parts_of(client, "vllm", max_tokens=3)
    assert (ids(parts), end(parts)) == ([17, 18, 19], ("length", None, 2))


@pytest.mark.parametrize("name", ["llama.cpp", "sglang"])
async def test_a_stop_token_that_the_server_does_not_know_ends_the_answer_and_its_work(
    stub: Stub, client: EngineClient, name: str
) -> None:
    closed = asyncio.Event()
    computed_there = 0

    async def behave(exchange: Exchange) -> None:
        nonlocal computed_there
        await exchange.events(end=False)
        for count in range(1, 1000):
            computed_there = count
            event: Any = llama_event([count], count)
            if name == "sglang":
                event = {"output_ids": list(range(1, count + 1)), "meta_info": {"completion_tokens": count}}
            await exchange.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.01)
            if exchange.gone.is_set():
                closed.set()
                return

    stub.behaviours[PATHS[name]] = behave
    parts = await parts_of(client, name, stops=(4, 5), max_tokens=50)
    assert (ids(parts), end(parts)[:2]) == ([1, 2, 3, 4], ("stop", 4))
    assert await asyncio.wait_for(closed.wait(), 2)
    assert computed_there < 50


async def test_a_stop_token_before_the_least_number_of_tokens_does_not_end_the_answer(stub: Stub, client: EngineClient) -> None:
    stub.streams(PATHS["vllm"], vllm_event([2, 17, 2], 3, "stop", 2), DONE)
    parts = await parts_of(client, "vllm", min_tokens=2)
    assert (ids(parts), end(parts)[:2]) == ([2, 17, 2], ("stop", 2))


async def test_a_stop_token_that_the_server_cut_off_is_in_the_answer(stub: Stub, client: EngineClient) -> None:
    stub.streams(PATHS["tensorrt-llm"], trtllm_event([17], 1), trtllm_event([], 1, "stop", 2), DONE)
    parts = await parts_of(client, "tensorrt-llm")
    assert (ids(parts), end(parts)[:2]) == ([17, 2], ("stop", 2))


async def test_tokens_after_the_one_that_ends_the_answer_are_dropped(stub: Stub, client: EngineClient) -> None:
    stub.streams(PATHS["vllm"], vllm_event([17, 2, 18, 19], 4), DONE)
    assert ids(await parts_of(client, "vllm")) == [17, 2]


async def test_as_many_alternatives_come_as_were_asked(stub: Stub, client: EngineClient) -> None:
    top = {"token_id:17": -2.5, "token_id:5": -0.5, "token_id:6": -1.0}
    logprobs = {"token_logprobs": [-2.5], "tokens": ["token_id:17"], "top_logprobs": [top]}
    stub.streams(PATHS["vllm"], vllm_event([17], 1, "length", logprobs=logprobs), DONE)
    for count, expected in ((2, [(5, -0.5), (6, -1.0)]), (0, [])):
        (token,) = (await parts_of(client, "vllm", max_tokens=1, logprobs=count))[0].tokens
        assert (token.logprob, list(token.top)) == (-2.5, expected)


@pytest.mark.parametrize(
    ("name", "events", "why"),
    [
        ("vllm", [vllm_event([17, 18, 19], 3), DONE], "more than 2 tokens"),
        ("vllm", [vllm_event([17], 1), vllm_event([18], 3), DONE], "counts 2 new tokens and names 1"),
        ("vllm", [vllm_event([100], 1)], "the token 100, the largest is 99"),
        ("vllm", [vllm_event([-1], 1)], "the token -1"),
        (
            "vllm",
            [{**vllm_event([17], 1), "usage": {"prompt_tokens": 4, "completion_tokens": 1}}],
            "a prompt of 4 tokens, not 3",
        ),
        ("llama.cpp", [llama_event([17], 9, "xé")], "counts 9 new tokens, 2 were left"),
        ("llama.cpp", [{**llama_event([17], 1), "tokens_evaluated": 4}], "a prompt of 4 tokens, not 3"),
        ("sglang", [{"output_ids": [17], "meta_info": {"completion_tokens": 2}}], "counts 2 new tokens and names 1"),
    ],
)
async def test_an_answer_that_cannot_be_right_is_a_protocol_error(
    stub: Stub, client: EngineClient, name: str, events: list[object], why: str
) -> None:
    stub.streams(PATHS[name], *events)
    with pytest.raises(EngineProtocolError, match=why):
        await parts_of(client, name, max_tokens=2)


async def test_an_event_that_comes_twice_counts_once(stub: Stub, client: EngineClient) -> None:
    stub.streams(PATHS["vllm"], vllm_event([17], 1), vllm_event([17], 1), vllm_event([18], 2, "length"), DONE)
    assert ids(await parts_of(client, "vllm", max_tokens=2)) == [17, 18]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("kept", [0, 1])
async def test_a_stream_without_an_end_is_unreachable(stub: Stub, client: EngineClient, name: str, kept: int) -> None:
    stub.streams(PATHS[name], *STREAMS[name][:kept])
    with pytest.raises(EngineUnreachable, match="before the end of the answer"):
        await parts_of(client, name)


async def test_a_stream_that_hangs_after_the_end_delays_it_by_two_seconds_at_most(stub: Stub, client: EngineClient) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.events(*STREAMS["vllm"][:2], end=False)
        await exchange.gone.wait()

    stub.behaviours[PATHS["vllm"]] = behave
    parts = await asyncio.wait_for(parts_of(client, "vllm"), 4)
    assert (ids(parts), end(parts)) == (TOKENS, ("stop", 2, None))


async def test_a_token_is_yielded_before_the_next_one_comes(stub: Stub, client: EngineClient) -> None:
    proceed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.events(vllm_event([17], 1), end=False)
        await proceed.wait()
        await exchange.chunk(b"data: " + json.dumps(vllm_event([18], 2, "length")).encode() + b"\n\n")
        await exchange.send(b"0\r\n\r\n")

    stub.behaviours[PATHS["vllm"]] = behave
    async with aclosing(computed(client, served("vllm"), asked(max_tokens=2))) as parts:
        assert ids([await anext(parts)]) == [17]
        proceed.set()
        assert ids([part async for part in parts]) == [18]


async def test_closing_an_answer_closes_its_connection(stub: Stub, client: EngineClient) -> None:
    closed = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        await exchange.events(vllm_event([17], 1), end=False)
        await exchange.gone.wait()
        closed.set()

    stub.behaviours[PATHS["vllm"]] = behave
    async with aclosing(computed(client, served("vllm"), asked())) as parts:
        await anext(parts)
    assert await asyncio.wait_for(closed.wait(), 2)


# llama.cpp leaves out the ids of tokens within a character: `é` is 30, 31 here, and `x` is 17.
PIECES = [{"id": 30, "piece": [0xC3]}, {"id": 31, "piece": [0xA9]}]
GAP: list[object] = [llama_event([17], 1), llama_event([31], 3, "é"), llama_event([18], 4), llama_end(4, "limit")]


async def test_an_id_that_the_stream_left_out_is_that_of_its_text(stub: Stub, client: EngineClient) -> None:
    stub.streams("/completion", *GAP)
    stub.at("/tokenize", {"tokens": PIECES})
    parts = await parts_of(client, "llama.cpp", max_tokens=4)
    assert (ids(parts), end(parts)[0]) == ([17, 30, 31, 18], "length")
    (question,) = (json.loads(request.body) for request in stub.requests if request.path == "/tokenize")
    assert (question["content"], question["add_special"], question["parse_special"]) == ("é", False, False)


@pytest.mark.parametrize(
    "answer",
    [
        {"tokens": [{"id": 40, "piece": " "}, *PIECES]},
        {"tokens": [{"id": 32, "piece": "é"}]},
        {"tokens": [{"id": 30, "piece": [0xC3]}, {"id": 33, "piece": [0xA9]}]},
        {"tokens": [{"id": 30, "piece": "xy"}, {"id": 31, "piece": [0xA9]}]},
        {"tokens": [30, 31]},
        {},
    ],
    ids=["too many", "too few", "another end", "other bytes", "no pieces", "nothing"],
)
async def test_tokens_that_cannot_be_told_are_computed_anew_and_the_answer_goes_on(
    stub: Stub, client: EngineClient, answer: object
) -> None:
    bodies: list[dict[str, Any]] = []

    async def behave(exchange: Exchange) -> None:
        bodies.append(body := json.loads(exchange.body))
        if not body["stream"]:
            await exchange.answer({**llama_end(2, "limit", 3), "tokens": [30, 31], "tokens_evaluated": 4, "content": "é"})
        elif len(body["prompt"]) == 3:
            await exchange.events(*GAP)
        else:
            events: list[object] = [llama_event([18], 1), llama_end(1, "limit", 5)]
            await exchange.events(*({**event, "tokens_evaluated": 6} for event in events))  # type: ignore[dict-item]

    stub.behaviours["/completion"] = behave
    stub.at("/tokenize", answer)
    parts = await parts_of(client, "llama.cpp", max_tokens=4)
    assert (ids(parts), end(parts)) == ([17, 30, 31, 18], ("length", None, None))
    assert [(body["stream"], body["prompt"][3:], body["n_predict"]) for body in bodies] == [
        (True, [], 4),
        (False, [17], 2),
        (True, [17, 30, 31], 1),
    ]
    assert len({body["seed"] for body in bodies}) == 3


@pytest.mark.parametrize(("stop_type", "finish"), [("limit", "length"), ("eos", "stop")])
async def test_an_answer_that_ends_within_a_character_has_all_its_tokens(
    stub: Stub, client: EngineClient, stop_type: str, finish: str
) -> None:
    async def behave(exchange: Exchange) -> None:
        if json.loads(exchange.body)["stream"]:
            await exchange.events(llama_event([17], 1), llama_end(3, stop_type))
        else:
            tokens = [30, 2] if stop_type == "eos" else [30, 31]
            await exchange.answer({**llama_end(2, stop_type), "tokens": tokens, "tokens_evaluated": 4})

    stub.behaviours["/completion"] = behave
    parts = await parts_of(client, "llama.cpp", max_tokens=3)
    assert ids(parts) == ([17, 30, 2] if stop_type == "eos" else [17, 30, 31])
    assert end(parts)[:2] == (finish, 2 if stop_type == "eos" else None)


@pytest.mark.parametrize("tokens", [[], [30], [30, 31, 32]])
async def test_what_is_computed_anew_is_checked_too(stub: Stub, client: EngineClient, tokens: list[int]) -> None:
    async def behave(exchange: Exchange) -> None:
        if json.loads(exchange.body)["stream"]:
            await exchange.events(*GAP)
        else:
            await exchange.answer({**llama_end(2, "limit"), "tokens": tokens, "tokens_evaluated": 4})

    stub.behaviours["/completion"] = behave
    stub.at("/tokenize", {})
    with pytest.raises(EngineProtocolError, match="came with their ids"):
        await parts_of(client, "llama.cpp", max_tokens=4)


async def test_a_refusal_is_passed_on(stub: Stub, client: EngineClient) -> None:
    stub.at("/generate", {"error": {"message": "too long"}}, "400 Bad Request")
    with pytest.raises(EngineRefused, match="too long"):
        await parts_of(client, SglangDialect.name)
