"""Steps that there is no memory for: done in parts, and at worst one request fails alone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.errors import Code
from ryzanstein.worker.engine.scheduling.pace import StepLimit


def tokens(it) -> dict:
    return dict(it.tokens)


@given(room_n=st.tuples(st.integers(1, 40), st.integers(1, 3)), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_whatever_the_memory_for_a_step_every_answer_is_whole(run, group, answer, room_n, lengths) -> None:
    room, n = room_n
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=32)
    it.ranks.short = lambda plan: len(plan.token_ids) > room
    messages = [group(i, [i] * length, max_tokens=5, n=n) for i, length in enumerate(lengths)]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    assert it.failed == {}
    assert tokens(it) == {(m.group, choice): answer(m, choice)[0] for m in messages for choice in range(n)}
    assert it.engine.stats().blocks_held == 0


def test_a_sequence_that_fits_no_more_even_alone_fails_alone_and_typed(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=32)
    it.ranks.short = lambda plan: any(a + b > 20 for a, b in zip(plan.num_context, plan.num_new, strict=True))
    messages = [group(1, [1] * 5, max_tokens=6), group(2, [2] * 16, max_tokens=12, n=2), group(3, [3] * 9, max_tokens=6)]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    failed = it.failed.pop(2)
    assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY")
    assert "rank 1" in failed.message
    assert it.failed == {}
    for message in (messages[0], messages[2]):
        assert it.tokens[message.group, 0] == answer(message, 0)[0]
    assert it.tokens[2, 0] == answer(messages[1], 0)[0][: len(it.tokens[2, 0])]
    assert it.engine.stats().blocks_held == 0


def test_a_choice_that_fails_takes_its_siblings_out_of_the_parts_that_follow(run, group) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=32)
    it.engine.submit(group(1, [1] * 6, max_tokens=20, n=4))
    it.step()
    it.step()
    it.ranks.short = lambda plan: True
    it.step()
    assert set(it.failed) == {1}
    assert not it.engine.has_work
    assert it.engine.stats().blocks_held == 0


def test_a_shortage_is_remembered_and_forgotten(run, group, answer) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=8)
    messages = [group(i, [i, i], max_tokens=200) for i in range(8)]
    for message in messages:
        it.engine.submit(message)
    it.step()
    it.step()
    it.ranks.short = lambda plan: len(plan.token_ids) > 4
    for _ in range(20):
        it.step()
    assert it.engine.stats().memory_retries == 1, "one failed try teaches it; the others are not tried"
    assert len(it.ranks.plans[-1].token_ids) == 4
    it.ranks.short = lambda plan: False
    for _ in range(40):
        it.step()
    assert len(it.ranks.plans[-1].token_ids) == 8
    it.drain()
    assert tokens(it) == {(m.group, 0): answer(m, 0)[0] for m in messages}


def test_a_long_prompt_with_memory_for_few_tokens_takes_many_short_steps(run, group, answer) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=512)
    it.ranks.short = lambda plan: len(plan.token_ids) > 2
    message = group(1, list(range(90)), max_tokens=4)
    it.engine.submit(message)
    num_plans: list[int] = []
    accepted = []
    while it.engine.has_work:
        accepted += it.step().accepted
        num_plans.append(len(it.ranks.plans))
        assert accepted == [1] or len(num_plans) == 1, "its router hears of it after the second step"
    assert num_plans[0] <= 8, "each execution that is too large halves the next one"
    assert {b - a for a, b in pairwise(num_plans)} == {1}
    assert it.tokens[1, 0] == answer(message, 0)[0]


def test_decodes_go_on_beside_a_prompt_that_memory_makes_slow(run, group, answer) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=512)
    messages = [group(i, [i, i], max_tokens=60) for i in range(4)]
    for message in messages:
        it.engine.submit(message)
    it.step()
    it.ranks.short = lambda plan: len(plan.token_ids) > 1
    it.engine.submit(group(9, [9] * 80, max_tokens=2))
    it.step()
    for _ in range(40):
        assert sorted(set(it.step().groups)) == [0, 1, 2, 3]
    it.drain()
    assert len(it.tokens[9, 0]) == 2
    assert {i: it.tokens[i, 0] for i in range(4)} == {m.group: answer(m, 0)[0] for m in messages}


def test_a_request_of_higher_priority_does_not_wait_for_prompts_that_memory_makes_slow(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=512)
    it.ranks.short = lambda plan: len(plan.token_ids) > 1
    it.engine.submit(group(1, [1] * 200, max_tokens=2, priority=0))
    for _ in range(20):
        it.step()
    it.engine.submit(group(2, [2] * 3, max_tokens=2, priority=1))
    for _ in range(8):
        it.step()
    assert len(it.tokens[2, 0]) == 2
    it.drain()


def test_a_single_token_is_always_tried() -> None:
    step_limit = StepLimit(8)
    for num_tokens in (8, 4, 2, 1, 1):
        assert step_limit.allows(1)
        step_limit.short(num_tokens)
    assert step_limit.allows(1)
    assert not step_limit.allows(2)


def test_steps_far_below_the_bound_do_not_raise_it() -> None:
    step_limit = StepLimit(64)
    step_limit.short(64)
    for _ in range(1000):
        step_limit.went(4)
    assert not step_limit.allows(64)


def test_steps_at_the_bound_double_it() -> None:
    step_limit = StepLimit(64)
    step_limit.short(64)
    for _ in range(64):
        step_limit.went(32)
    assert step_limit.allows(64)
