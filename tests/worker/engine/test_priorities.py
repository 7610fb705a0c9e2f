"""Higher priorities pause lower ones where places or blocks are short; paused ones go on where they were."""

from __future__ import annotations

import pytest

from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.memory.kv_pages import KVPages


def answers(it) -> dict:
    return {key: tokens for key, tokens in it.tokens.items() if key in it.ended}


def test_a_higher_priority_takes_a_place_at_once_when_all_are_taken(run, group, answer) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=4, token_budget=64)
    low = [group(number, [number] * 9, max_tokens=30) for number in range(4)]
    for message in low:
        it.engine.submit(message)
    for _ in range(10):
        it.step()
    high = group(100, [5] * 9, max_tokens=5, priority=2)
    it.engine.submit(high)
    step = it.step()
    assert 100 in step.groups
    assert step.paused == [(3, 0)]
    it.drain()
    assert answers(it) == {(message.group, 0): answer(message, 0)[0] for message in [*low, high]}
    stats = it.engine.stats()
    assert (stats.paused, stats.resumed) == ({"priority": 1}, 1)


def test_the_last_admitted_of_the_lowest_priority_is_paused(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=3, token_budget=64)
    for number, priority in [(1, 0), (2, 1), (3, 0)]:
        it.engine.submit(group(number, [number] * 4, max_tokens=20, priority=priority))
    it.step()
    it.engine.submit(group(4, [4] * 4, max_tokens=2, priority=5))
    assert set(it.step().groups) == {1, 2, 4}


def test_a_paused_sequence_is_computed_again_from_the_prefix_cache(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=1, token_budget=64)
    it.engine.submit(group(1, range(40), max_tokens=30))
    for _ in range(10):
        it.step()
    before = it.engine.stats()
    it.engine.submit(group(2, [7], max_tokens=1, priority=1))
    it.step()
    it.step()
    after = it.engine.stats()
    assert after.prefill_tokens - before.prefill_tokens <= 1 + 4, "its own prompt, and less than a block of the other"
    it.drain()
    assert len(it.tokens[1, 0]) == 30


def test_a_stream_of_short_high_priorities_costs_a_long_low_one_little_more_than_their_time(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=1, token_budget=64)
    it.engine.submit(group(0, range(64), max_tokens=40))
    for number in range(1, 20):
        it.step()
        it.step()
        it.engine.submit(group(number, [number], max_tokens=1, priority=1))
    it.drain()
    assert it.engine.stats().paused == {"priority": 19}
    assert len(it.ranks.plans) <= 40 + 19 + 19
    assert it.engine.stats().prefill_tokens <= 64 + 19 + 19 * 4


def test_equal_priorities_never_pause_each_other_for_a_place(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=2, token_budget=64)
    for number in range(20):
        it.engine.submit(group(number, [number] * 4, max_tokens=6, tenant=f"tenant {number % 3}", priority=1))
        it.step()
    it.drain()
    assert it.engine.stats().paused == {}


@pytest.mark.parametrize("priority", [-3, 0, 3])
def test_tokens_and_lines_are_counted_by_priority(run, group, priority) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=1, token_budget=64)
    for number in range(3):
        it.engine.submit(group(number, [number] * 4, max_tokens=6, priority=priority))
    it.step()
    assert it.engine.stats().classes[priority].waiting == 2
    it.drain()
    stats = it.engine.stats().classes[priority]
    assert (stats.waiting, stats.prefill_tokens, stats.decode_tokens) == (0, 12, 18)


def full(run, group, **fields):
    it = run(num_blocks=256, block_size=4, max_sequences=1, token_budget=64, max_waiting=16)
    for number in range(17):
        it.engine.submit(group(number, [number] * 4, max_tokens=6, **fields))
        if number == 0:
            it.step()
    return it


def test_a_full_line_gives_a_place_to_a_higher_priority_the_youngest_must_go(run, group) -> None:
    it = full(run, group)
    it.engine.submit(group(100, [1], priority=1))
    it.step()
    assert [(failure.group, failure.reason) for failure in it.failed.values()] == [(16, "QUEUE_FULL")]
    it.drain()
    assert next(iter(it.ended)) == (100, 0)


def test_a_full_line_gives_a_place_to_a_tenant_with_fewer(run, group) -> None:
    it = full(run, group, tenant="heavy")
    for number in range(100, 120):
        it.engine.submit(group(number, [1], tenant="light"))
    it.step()
    failed = set(it.failed)
    assert len({number for number in failed if number < 100}) == 8
    assert len({number for number in failed if number >= 100}) == 12, "up to half of the places, no more"
    assert it.engine.stats().shed == {"displaced": 8, "full": 12}


def test_a_full_line_gives_a_place_to_a_continuation_and_never_takes_that_of_one(run, group) -> None:
    it = full(run, group)
    for number in range(100, 120):
        it.engine.submit(group(number, [1], generated=[[1, 2]]))
    it.step()
    assert {number for number in it.failed if number < 100} == set(range(1, 17))
    assert {number for number in it.failed if number >= 100} == set(range(116, 120))


def test_a_lower_priority_displaces_nobody(run, group) -> None:
    it = full(run, group, tenant="heavy")
    it.engine.submit(group(100, [1], tenant="light", priority=-1))
    it.step()
    assert set(it.failed) == {100}


def test_an_answer_does_not_depend_on_how_often_it_was_paused(run, group, answer) -> None:
    it = run(num_blocks=24, block_size=4, max_sequences=3, token_budget=16)
    messages = [
        group(i, [i] * (3 + i % 5), max_tokens=10 + i, priority=i % 4, tenant=f"{i % 3}", n=1 + i % 2) for i in range(24)
    ]
    for message in messages:
        it.engine.submit(message)
        it.step()
    it.drain()
    assert it.engine.stats().preemptions > 3
    assert answers(it) == {(m.group, c): answer(m, c)[0] for m in messages for c in range(m.sampling.n)}
    assert isinstance(it.engine._scheduler.pool, BlockPool)
    assert isinstance(it.engine._scheduler.pages, KVPages)
