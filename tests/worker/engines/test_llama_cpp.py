"""A real second engine: llama.cpp's own server with the demo model, beside a node of ours."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.worker.engines.llama_server import llama_server

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.generation.request import SamplingParams
from ryzanstein.lab.chaos.machines.llama.server import llama_file
from ryzanstein.worker.engines.remote.answers.computing import computed
from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineRefused, EngineUnreachable
from ryzanstein.worker.engines.remote.probing import ServedEngine, probe
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.cluster
SLOTS, CONTEXT, NUM_TOKENS = 4, 512, 32
COUNT = "Count from 1 to 40."


@pytest.fixture(scope="module")
def address(demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("llama")
    with llama_server(llama_file(folder), folder / "log", context=CONTEXT, slots=SLOTS) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(EngineAddress.parse(address), silence_s=20.0)
    yield client
    await client.close()


@pytest.fixture
async def served(client: EngineClient) -> ServedEngine:
    return await probe(client)


@pytest.fixture(scope="module")
def prompt(text_model: TextModel) -> list[int]:
    return text_model.encode_chat([Message(Role.USER, COUNT)])


async def parts_of(client: EngineClient, served: ServedEngine, asked: AskedChoice) -> list[ComputedPart]:
    async with aclosing(computed(client, served, asked)) as parts:
        return [part async for part in parts]


def tokens_of(parts: Sequence[ComputedPart]) -> list[ComputedToken]:
    return [token for part in parts for token in part.tokens]


def ids_of(parts: Sequence[ComputedPart]) -> list[int]:
    return [token.token_id for token in tokens_of(parts)]


def asked(prompt: Sequence[int], generated: Sequence[int] = (), stops: Sequence[int] = (0,), **sampling: Any) -> AskedChoice:
    most = sampling.pop("max_tokens", NUM_TOKENS - len(generated))
    seed = sampling.pop("seed", 7)
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return AskedChoice([*prompt, *generated], len(prompt), params, seed, most, 0, stops)


async def own(link: Any, attempt: Any, **sampling: Any) -> Any:
    """The answer of our own engine, in 32-bit floats as the demo model is."""
    return await link.run(attempt(COUNT, **{"max_tokens": NUM_TOKENS, **sampling}))


async def test_the_server_is_found_as_it_was_started(served: ServedEngine, text_model: TextModel) -> None:
    assert served.dialect.name == "llama.cpp"
    assert served.version.startswith("llama.cpp ")
    assert (served.context_length, served.max_sequences, served.vocabulary) == (CONTEXT, SLOTS, text_model.vocab_size)


async def test_greedy_tokens_are_those_of_our_engine(
    client: EngineClient, served: ServedEngine, prompt: list[int], link: Any, attempt: Any
) -> None:
    parts = await parts_of(client, served, asked(prompt))
    ours = await own(link, attempt)
    assert ours.prompt_tokens == len(prompt)
    assert ids_of(parts) == ours.tokens()
    assert len(ids_of(parts)) == NUM_TOKENS
    assert parts[-1].finish == "length"
    assert any(part.prompt_computed for part in parts)


@pytest.mark.parametrize("at", [1, 17, 31])
async def test_an_answer_goes_on_where_it_was_cut(
    client: EngineClient, served: ServedEngine, prompt: list[int], at: int
) -> None:
    whole = ids_of(await parts_of(client, served, asked(prompt)))
    rest = await parts_of(client, served, asked(prompt, whole[:at]))
    assert ids_of(rest) == whole[at:]


async def test_log_probabilities_are_those_of_our_engine(
    client: EngineClient, served: ServedEngine, prompt: list[int], link: Any, attempt: Any
) -> None:
    tokens = tokens_of(await parts_of(client, served, asked(prompt, logprobs=3, logit_bias=((40, 1.0),))))
    ours = await own(link, attempt, logprobs=3, logit_bias=((40, 1.0),))
    assert [token.token_id for token in tokens] == ours.tokens()
    for index, token in enumerate(tokens):
        expected = ours.logprobs[0, index]
        assert token.logprob is not None
        assert math.isclose(token.logprob, expected.logprob, abs_tol=1e-3)
        assert len(token.top) == 3
        for (_, logprob), other in zip(token.top, expected.top, strict=True):
            assert math.isclose(logprob, other.logprob, rel_tol=1e-3, abs_tol=1e-3)


async def test_a_repetition_penalty_counts_prompt_and_answer_as_ours_does(
    client: EngineClient, served: ServedEngine, text_model: TextModel, link: Any, attempt: Any
) -> None:
    question, penalty = "Count from 5 to 9, then from 5 to 9.", {"repetition_penalty": 2.0}
    prompt = text_model.encode_chat([Message(Role.USER, question)])
    whole = ids_of(await parts_of(client, served, asked(prompt, **penalty)))
    ours = await link.run(attempt(question, max_tokens=NUM_TOKENS, **penalty))
    assert whole == ours.tokens()
    assert whole[:6] != ids_of(await parts_of(client, served, asked(prompt)))[:6], "the penalty changes the answer"
    assert ids_of(await parts_of(client, served, asked(prompt, whole[:17], **penalty))) == whole[17:]


async def test_the_end_of_text_is_in_the_answer_and_its_connection_is_kept(
    client: EngineClient, served: ServedEngine, prompt: list[int], text_model: TextModel
) -> None:
    (end,) = text_model.eos_token_ids
    bias = ((end, 100.0),)
    for _ in range(3):
        parts = await parts_of(client, served, asked(prompt, stops=(end,), logit_bias=bias))
        assert (ids_of(parts), parts[-1].finish, parts[-1].stop_token) == ([end], "stop", end)
    assert parts[-1].cached_tokens == len(prompt) - 1


async def test_a_stop_token_that_only_we_know_ends_the_answer(
    client: EngineClient, served: ServedEngine, prompt: list[int]
) -> None:
    whole = ids_of(await parts_of(client, served, asked(prompt)))
    parts = await parts_of(client, served, asked(prompt, stops=(whole[5],)))
    first = whole.index(whole[5])
    assert (ids_of(parts), parts[-1].finish) == (whole[: first + 1], "stop")
    await idle(client)


async def busy(client: EngineClient) -> int:
    slots: Any = await client.get("/slots")
    return sum(bool(slot["is_processing"]) for slot in slots)


async def idle(client: EngineClient) -> None:
    for _ in range(500):
        if not await busy(client):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a slot computes on")


async def test_closing_an_answer_frees_its_slot(client: EngineClient, served: ServedEngine, prompt: list[int]) -> None:
    long = asked(prompt, stops=(), ignore_eos=True, max_tokens=CONTEXT - len(prompt) - 1)
    async with aclosing(computed(client, served, long)) as parts:
        async for part in parts:
            if part.tokens:
                break
        assert await busy(client) == 1
    await idle(client)


async def test_sixteen_answers_at_once_are_each_as_alone(
    client: EngineClient, served: ServedEngine, text_model: TextModel
) -> None:
    prompts = [text_model.encode_chat([Message(Role.USER, f"Count from {first} to 40.")]) for first in range(1, 17)]
    alone = [ids_of(await parts_of(client, served, asked(prompt))) for prompt in prompts]
    together = await asyncio.gather(*(parts_of(client, served, asked(prompt)) for prompt in prompts))
    assert [ids_of(parts) for parts in together] == alone
    assert len({tuple(answer) for answer in alone}) > 4


@pytest.mark.long
async def test_answers_that_are_cut_again_and_again_lose_and_repeat_no_token(
    client: EngineClient, served: ServedEngine, text_model: TextModel
) -> None:
    """Twelve at once on four slots: many are cut while they wait for one."""
    prompts = [text_model.encode_chat([Message(Role.USER, f"Count from {first} to 60.")]) for first in range(1, 13)]
    alone = [ids_of(await parts_of(client, served, asked(prompt))) for prompt in prompts]
    cuts = Random(1)
    num_cuts = 0

    async def cut_again_and_again(prompt: list[int]) -> list[int]:
        nonlocal num_cuts
        known: list[int] = []
        while len(known) < NUM_TOKENS:
            most = len(known) + cuts.randrange(1, 8)
            async with aclosing(computed(client, served, asked(prompt, known))) as parts:
                async for part in parts:
                    known += ids_of([part])
                    if len(known) >= most:
                        num_cuts += 1
                        break
        return known

    for _ in range(4):
        assert await asyncio.gather(*(cut_again_and_again(prompt) for prompt in prompts)) == alone
    assert num_cuts > 200
    await idle(client)


async def test_random_answers_are_those_of_their_seed_and_within_top_k(
    client: EngineClient, served: ServedEngine, prompt: list[int]
) -> None:
    answers = []
    for seed in (1, 1, 2, 3, 4, 5, 2**64 - 1):
        tokens = tokens_of(await parts_of(client, served, asked(prompt, temperature=2.0, top_k=5, seed=seed, logprobs=5)))
        assert all(token.token_id in {likely for likely, _ in token.top} for token in tokens)
        answers.append(tuple(token.token_id for token in tokens))
    assert answers[0] == answers[1]
    assert len(set(answers)) > 1


BYTES = "é中😀"


async def test_ids_within_a_character_are_all_there(client: EngineClient, served: ServedEngine, text_model: TextModel) -> None:
    """The model is forced to write characters of several tokens, one token after the other."""
    wanted = list(text_model.encode(BYTES))
    assert len(wanted) > 6, "each character has several tokens"
    given = list(text_model.encode("x"))
    for count in range(len(wanted)):
        bias = ((wanted[count], 100.0),)
        (token,) = tokens_of(await parts_of(client, served, asked(given, wanted[:count], logit_bias=bias, max_tokens=1)))
        assert token.token_id == wanted[count]


async def test_an_answer_of_split_characters_has_every_id(
    client: EngineClient, served: ServedEngine, text_model: TextModel
) -> None:
    """Nothing but three tokens that are parts of characters may come."""
    parts = sorted(set(text_model.encode("é中😀ß")))
    bias = tuple((token, 90.0) for token in parts)
    for seed in range(5):
        question = asked(text_model.encode("x"), logit_bias=bias, temperature=1.5, seed=seed, stops=(), max_tokens=24)
        found = await parts_of(client, served, question)
        assert len(ids_of(found)) == 24
        assert set(ids_of(found)) <= set(parts)
        assert found[-1].finish == "length"
    await idle(client)


async def test_what_does_not_fit_the_context_is_refused(client: EngineClient, served: ServedEngine, prompt: list[int]) -> None:
    with pytest.raises(EngineRefused) as refused:
        await parts_of(client, served, asked((prompt * CONTEXT)[: CONTEXT + 10], max_tokens=8))
    assert refused.value.status == 400


async def test_a_server_that_dies_in_an_answer_is_unreachable(demo_dir: Path, tmp_path: Path, prompt: list[int]) -> None:
    with llama_server(llama_file(tmp_path), tmp_path / "log", slots=1) as address:
        client = EngineClient(EngineAddress.parse(address), silence_s=20.0)
        await client.healthy(5)
        served = await probe(client)
        parts = computed(client, served, replace(asked(prompt, stops=()), max_tokens=400))
        while not (await anext(parts)).tokens:
            pass
    with pytest.raises(EngineUnreachable):
        [part async for part in parts]
    with pytest.raises(EngineUnreachable):
        await client.healthy(5)
    await client.close()
