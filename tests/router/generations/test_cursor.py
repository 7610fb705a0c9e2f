"""Reading a generation: a reader that is far behind takes turns with the rest of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import Delta, FinishReason, Token, TokenLogprobs
from ryzanstein.router.generations.cursor import MAX_DELTA_TOKENS, MAX_LOGPROB_TOKENS, follow
from ryzanstein.router.generations.generation import Generation


class Nobody:
    """An observer of generations that does nothing."""

    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None: ...

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: Collection[asyncio.Event]) -> None: ...


@pytest.mark.parametrize(("logprobs", "most"), [(None, MAX_DELTA_TOKENS), (5, MAX_LOGPROB_TOKENS)])
async def test_other_tasks_run_between_the_deltas_of_a_long_answer(logprobs, most):
    generation = Generation("g", GenerationRequest("m", TextPrompt("x"), SamplingParams(logprobs=logprobs)), Nobody())
    generation.start("node-0", 1)
    tokens = [Token(1, "[", None if logprobs is None else TokenLogprobs(-1.0))] * (10 * most)
    for token in tokens:
        generation.log.choices[0].append(token, "node-0")
    generation.log.choices[0].reason = FinishReason.STOP
    generation.end_choice(0)
    generation.settle()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    deltas = [event async for event in follow(generation, {}) if isinstance(event, Delta)]
    other.cancel()
    assert [len(delta.tokens) for delta in deltas] == [most] * 10
    assert turns >= 10
