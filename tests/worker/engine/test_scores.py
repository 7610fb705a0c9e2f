"""Prompts that are scored: each token once and by the row before it, whatever is cached, paused or cut into chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ryzanstein.worker.engine.sequence import MAX_SCORED

PROMPT = [(7 * i) % 90 + 1 for i in range(50)]


def scores_of(run: Any, max_steps: int = 500) -> dict[int, list[tuple[float, list[tuple[int, float]]]]]:
    """The scores of each group in order; asserts that no token is scored twice or left out."""
    scores: dict[int, list[Any]] = {}
    for _ in range(max_steps):
        if not run.engine.has_work:
            return scores
        for group, first, rows in run.step().scores:
            known = scores.setdefault(group, [])
            assert first == 1 + len(known), "a gap or a repeat"
            known += rows
    raise AssertionError("the engine does not come to an end")


def expected(prompt: list[int]) -> list[float]:
    return [-float(token) for token in prompt[:-1]]


@pytest.mark.parametrize("budget", [4, 16, 64])
def test_every_token_but_the_first_is_scored_once(run: Any, group: Any, answer: Any, budget: int) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=budget)
    message = group(1, PROMPT, n=2, prompt_logprobs=2, generated=[[], []], finished=[False, False])
    it.engine.submit(message)
    (rows,) = scores_of(it).values()
    assert [own for own, _ in rows] == expected(PROMPT)
    assert all(len(top) == 2 for _, top in rows)
    assert it.tokens[1, 0] == answer(message, 0)[0]


def test_a_cached_prompt_is_computed_whole(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=64)
    for number in (1, 2, 3):
        it.engine.submit(group(number, PROMPT, prompt_logprobs=None if number == 1 else 0))
        scores = scores_of(it)
        assert [own for own, _ in scores.get(number, [])] == ([] if number == 1 else expected(PROMPT))
        assert it.ended[number, 0].cached_tokens == 0
    it.engine.submit(group(4, PROMPT))
    it.drain()
    assert it.ended[4, 0].cached_tokens > 0, "what was scored is found by others"


def test_a_paused_prompt_goes_on_where_its_scores_end(run: Any, group: Any) -> None:
    it = run(num_blocks=20, block_size=4, max_sequences=4, token_budget=16)
    it.engine.submit(group(1, PROMPT, prompt_logprobs=0))
    events = it.step()
    seen = [row for _, _, rows in events.scores for row in rows]
    it.engine.submit(group(2, [1, 2, 3] * 20, priority=5))
    for _ in range(200):
        if not it.engine.has_work:
            break
        for number, first, rows in it.step().scores:
            assert (number, first) == (1, 1 + len(seen))
            seen += rows
    assert [own for own, _ in seen] == expected(PROMPT)
    assert it.engine.stats().preemptions > 0


def test_a_step_scores_no_more_than_its_bound(run: Any, group: Any) -> None:
    prompt = [5] * 300
    it = run(num_blocks=128, block_size=4, max_sequences=4, token_budget=512)
    it.engine.submit(group(1, prompt, prompt_logprobs=0))
    while it.engine.has_work:
        assert sum(len(rows) for _, _, rows in it.step().scores) <= 128


def test_the_last_token_of_a_bad_word_is_never_drawn(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=64)
    it.engine.submit(group(1, [1, 2, 3], max_tokens=12))
    it.drain()
    free = it.tokens[1, 0]
    bad = free[4:6]
    for known in range(6):
        message = group(2 + known, [1, 2, 3], max_tokens=12, bad_sequences=[bad, [free[8]]], generated=[free[:known]])
        it.engine.submit(message)
        it.drain()
        text = free[:known] + it.tokens[2 + known, 0]
        pairs = list(pairwise(text))
        assert tuple(bad) not in pairs[known and known - 1 :]
        assert free[8] not in text[known:]


def test_a_long_prompt_that_is_scored_leaves_the_rest_of_each_step_to_others(run: Any, group: Any) -> None:
    """A step scores few tokens of a prompt. Others do not wait until it is at its end."""
    it = run(num_blocks=400, block_size=4, max_sequences=4, token_budget=MAX_SCORED + 32)
    it.engine.submit(group(1, [i % 90 for i in range(5 * MAX_SCORED)], prompt_logprobs=0))
    it.engine.submit(group(2, PROMPT[:30], max_tokens=1))
    it.step()
    assert (2, 0) in it.tokens
    it.drain()
    assert (1, 0) in it.ended
