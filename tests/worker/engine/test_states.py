"""Slots of states: what a prompt resumes from, what is left when slots run short, and steps that do not count.

The fake ranks keep in a slot all tokens that led to it, so a wrong source or target gives an error.
"""

from __future__ import annotations

import random

import pytest

from ryzanstein.worker.engine.extents import SLACK
from ryzanstein.worker.engine.memory.states import INTERVAL

SIZE = 16


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


@pytest.fixture
def new(run):
    def make(**settings):
        usual = {"num_blocks": 600, "block_size": SIZE, "max_sequences": 4, "token_budget": 512, "num_states": 32}
        return run(**{**usual, **settings})

    return make


def computed(it, group) -> int:
    """How many prompt tokens a group computes from its submission to its end."""
    before = it.engine.stats().prefill_tokens
    it.engine.submit(group)
    it.drain()
    return it.engine.stats().prefill_tokens - before


def test_a_second_turn_computes_what_is_new_and_at_most_two_pages(new, group) -> None:
    it, prompt = new(), prompt_of(1501, 1)
    assert computed(it, group(1, prompt, max_tokens=90)) == len(prompt)
    turn = [*prompt, *it.tokens[1, 0], *prompt_of(33, 2)]
    assert 33 <= computed(it, group(2, turn)) <= 33 + (SLACK + 1) * SIZE
    assert it.engine.stats().without_state == pytest.approx(0, abs=SIZE * SLACK)


@pytest.mark.parametrize("length", [160, 161, 175])
def test_another_answer_to_the_same_prompt_computes_its_last_pages(new, group, length) -> None:
    it, prompt = new(), prompt_of(length, 3)
    computed(it, group(1, prompt, max_tokens=200))
    assert computed(it, group(2, [*prompt, *prompt_of(20, 5)])) <= 20 + SIZE
    assert computed(it, group(3, prompt)) <= (SLACK + 1) * SIZE


def test_the_end_of_a_prompt_may_be_written_differently_in_the_next_turn(new, group) -> None:
    """As templates do that open an answer with a mark of thinking."""
    it, prompt = new(), prompt_of(400, 3)
    computed(it, group(1, [*prompt, 5, 6], max_tokens=200))
    assert computed(it, group(2, [*prompt, 7, 8, 9])) <= 3 + SIZE


def test_a_prompt_that_differs_in_the_middle_begins_at_the_last_interval(new, group) -> None:
    it, prompt = new(), prompt_of(2000, 7)
    computed(it, group(1, prompt))
    other = [*prompt[:1700], *prompt_of(300, 8)]
    assert computed(it, group(2, other)) == 2000 - 1700 // INTERVAL * INTERVAL
    assert it.engine.stats().without_state == 1700 // SIZE * SIZE - 1700 // INTERVAL * INTERVAL


def test_a_third_prompt_begins_where_the_second_left_what_it_shares(new, group) -> None:
    """A system prompt: its end is worth a state once it was seen twice."""
    it, shared = new(), prompt_of(330, 9)
    computed(it, group(1, [*shared, *prompt_of(100, 10)]))
    assert computed(it, group(2, [*shared, *prompt_of(100, 11)])) > 400
    assert computed(it, group(3, [*shared, *prompt_of(100, 12)])) <= 100 + SIZE


def test_choices_of_one_prompt_share_all_but_its_last_pages(new, group) -> None:
    it, prompt = new(), prompt_of(800, 13)
    assert computed(it, group(1, prompt, n=4, max_tokens=40)) <= 800 + 3 * (SLACK + 1) * SIZE
    assert len({tuple(it.tokens[1, choice]) for choice in range(4)}) == 4


def test_an_answer_keeps_few_snapshots_of_itself(new, group) -> None:
    it = new(num_states=12)
    computed(it, group(1, prompt_of(320, 1)))
    before = it.engine.stats().states.cached
    computed(it, group(2, prompt_of(40, 2), max_tokens=400))
    assert it.engine.stats().states.cached >= before
    assert computed(it, group(3, prompt_of(320, 1))) <= (SLACK + 1) * SIZE


def test_a_long_prompt_does_not_evict_the_ends_of_others(new, group) -> None:
    it = new(num_states=12, num_blocks=2000)
    for number in range(3):
        computed(it, group(number, prompt_of(100, number)))
    computed(it, group(10, prompt_of(20 * INTERVAL, 99)))
    for number in range(3):
        assert computed(it, group(20 + number, prompt_of(100, number))) <= (SLACK + 1) * SIZE


def test_a_paused_sequence_resumes_near_where_it_was(new, group, answer) -> None:
    it = new(num_blocks=60)
    messages = [group(number, prompt_of(300, number), max_tokens=200) for number in range(3)]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    stats = it.engine.stats()
    assert stats.preemptions > 0
    for message in messages:
        assert it.tokens[message.group, 0] == answer(message, 0)[0]


def test_every_slot_comes_back(new, group) -> None:
    it = new(num_states=12)
    for number in range(6):
        it.engine.submit(group(number, prompt_of(200 + number, number), max_tokens=50, n=2))
    for _ in range(5):
        it.step()
    for number in range(6):
        it.engine.cancel(number)
    it.drain()
    assert it.engine.stats().states.held == 0


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_each_alone_whatever_happens(new, group, answer, seed) -> None:
    """Prompts share beginnings, steps run out of memory, rows fail, groups are cancelled, blocks and slots are few."""
    rng = random.Random(seed)
    it = new(num_states=rng.choice([12, 13, 20]), num_blocks=rng.choice([70, 200]), token_budget=rng.choice([16, 100, 512]))
    texts = [prompt_of(700, 1000 + number) for number in range(2)]
    messages = [
        group(
            number,
            rng.choice(texts)[: rng.randint(1, 700)] + prompt_of(rng.randint(0, 60), number),
            max_tokens=rng.randint(1, 60),
            n=rng.choice([1, 1, 3]),
            priority=rng.choice([0, 0, 1]),
        )
        for number in range(25)
    ]
    failing, cancelled = {3, 11}, {5, 17}
    prompts = [messages[number].prompt_ids for number in failing]
    it.ranks.failing = lambda row: list(row.prompt_ids) in prompts and row.index > 2 and len(it.ranks.plans[-1].token_ids) > 1
    it.ranks.short = lambda plan: len(plan.token_ids) > 1 and rng.random() < 0.05
    waiting = list(messages)
    for _ in range(20_000):
        if waiting and rng.random() < 0.2:
            it.engine.submit(waiting.pop(0))
        if rng.random() < 0.01:
            it.engine.cancel(rng.choice(sorted(cancelled)))
        if not waiting and not it.engine.has_work:
            break
        it.step()
    assert it.engine.stats().states.held == 0
    for message in messages:
        if message.group in cancelled | failing:
            continue
        for choice in range(message.sampling.n):
            assert it.tokens[message.group, choice] == answer(message, choice)[0], message.group
