"""Vectors of prompts: each hidden state once, whatever is cached, paused, cut into chunks or in the same step."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

PROMPT = [(7 * i) % 90 + 1 for i in range(50)]
MEAN = pytest.approx(sum(PROMPT) / len(PROMPT))


def vectors_of(run: Any, max_steps: int = 500) -> dict[int, float]:
    """The vectors of each group: numbers of one dimension, as the fake ranks compute them."""
    vectors: dict[int, float] = {}
    for _ in range(max_steps):
        if not run.engine.has_work:
            return vectors
        for group, raw in run.step().vectors:
            assert group not in vectors, "a vector came twice"
            (vectors[group],) = array("f", raw)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("budget", [5, 16, 64])
def test_the_mean_is_of_all_tokens_and_the_last_is_the_last(run: Any, group: Any, answer: Any, budget: int) -> None:
    it = run(num_blocks=96, block_size=4, max_sequences=4, token_budget=budget)
    text = group(3, PROMPT[:9])
    it.engine.submit(group(1, PROMPT, max_tokens=1, pooling="mean"))
    it.engine.submit(group(2, PROMPT, max_tokens=1, pooling="last"))
    it.engine.submit(text)
    assert vectors_of(it) == {1: MEAN, 2: PROMPT[-1]}
    assert it.tokens[3, 0] == answer(text, 0)[0], "a generation in the same steps goes on as ever"
    assert (1, 0) not in it.tokens
    assert it.engine.stats().blocks_held == 0


def test_a_mean_is_computed_whole_and_a_last_token_from_the_cache(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=64)
    for number, pooling in enumerate(("mean", "mean", "last"), 1):
        it.engine.submit(group(number, PROMPT, max_tokens=1, pooling=pooling))
        vectors_of(it)
    assert [it.ended[number, 0].cached_tokens for number in (1, 2, 3)] == [0, 0, 48]


def test_a_paused_mean_goes_on_where_it_was(run: Any, group: Any) -> None:
    it = run(num_blocks=20, block_size=4, max_sequences=4, token_budget=16)
    it.engine.submit(group(1, PROMPT, max_tokens=1, pooling="mean"))
    it.step()
    it.engine.submit(group(2, [1, 2, 3] * 20, priority=5))
    assert vectors_of(it) == {1: MEAN}
    assert it.engine.stats().preemptions > 0


def test_one_token_is_a_prompt_too(run: Any, group: Any) -> None:
    it = run(num_blocks=8, block_size=4, max_sequences=4, token_budget=16)
    for number, pooling in enumerate(("mean", "last")):
        it.engine.submit(group(number, [5], max_tokens=1, pooling=pooling))
    assert vectors_of(it) == {0: 5, 1: 5}


def test_a_step_that_is_too_large_is_halved(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=64)
    it.ranks.short = lambda plan: len(plan.token_ids) > 7
    it.engine.submit(group(1, PROMPT, max_tokens=1, pooling="mean"))
    assert vectors_of(it) == {1: MEAN}
