"""An engine whose blocks are lent and taken back: answers stay whole, and the limit holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.engine.memory.blocks import BlockPool


def lender(run, **given):
    return run(**{"num_blocks": 12, "borrowable_blocks": 20, "block_size": 4, "max_sequences": 8, "token_budget": 16, **given})


def test_borrowed_blocks_let_more_sequences_run(run, group, answer) -> None:
    messages = [group(i, [i] * 10, max_tokens=20) for i in range(6)]
    running = []
    for limit in (12, 32):
        it = lender(run)
        it.engine.limit_blocks(limit)
        for message in messages:
            it.engine.submit(message)
        running.append(max(it.step().stats.running for _ in range(8)))
        it.drain()
        assert it.tokens == {(m.group, 0): answer(m, 0)[0] for m in messages}
    assert running[0] < running[1] == 6


def test_what_waiting_sequences_lack_is_reported_and_only_then(run, group) -> None:
    it = lender(run, token_budget=128)
    it.engine.submit(group(0, [1] * 40, max_tokens=4))
    assert it.step().stats.blocks_wanted == 0
    it.engine.submit(group(1, [2] * 40, max_tokens=4))
    assert it.step().stats.blocks_wanted >= 8
    it.engine.limit_blocks(32)
    stats = it.step().stats
    assert (stats.blocks_wanted, stats.block_limit, stats.running) == (0, 32, 2)


def test_cached_blocks_are_given_back_before_any_sequence_is_paused(run, group) -> None:
    it = lender(run)
    it.engine.limit_blocks(32)
    for i in range(2):
        it.engine.submit(group(i, list(range(50 * i, 50 * i + 40)), max_tokens=2))
    it.drain()
    it.engine.submit(group(2, [7] * 20, max_tokens=8))
    it.step()
    assert it.engine.stats().blocks_cached > 12
    it.engine.limit_blocks(12)
    stats = [it.step().stats for _ in range(10)][-1]
    assert stats.block_limit == it.ranks.released_from == 12
    assert stats.preemptions == 0
    assert stats.blocks_cached > 0, "what fits stays cached"
    assert stats.takebacks == 1


def test_the_lowest_priority_gives_its_blocks_back_first(run, group, answer) -> None:
    it = lender(run)
    it.engine.limit_blocks(32)
    messages = [group(i, [i] * 20, max_tokens=20, priority=priority) for i, priority in enumerate((1, 2, 0))]
    for message in messages:
        it.engine.submit(message)
    for _ in range(8):
        it.step()
    it.engine.limit_blocks(17)
    assert it.step().paused == [(2, 0)]
    assert it.engine.stats().paused == {"takeback": 1}
    it.engine.limit_blocks(10)
    assert it.step().paused == [(0, 0)]
    it.drain()
    assert it.tokens == {(m.group, 0): answer(m, 0)[0] for m in messages}


def test_blocks_are_given_back_in_bounded_steps_without_any_work(run, group) -> None:
    it = lender(run, token_budget=8)
    it.engine.limit_blocks(32)
    for i in range(3):
        it.engine.submit(group(i, list(range(40 * i, 40 * i + 36)), max_tokens=2))
    it.drain()
    it.engine.limit_blocks(12)
    assert it.engine.has_work
    steps = 0
    while it.engine.has_work:
        it.step()
        steps += 1
    assert it.ranks.released_from == it.engine.stats().block_limit == 12
    assert steps <= 1 + 12 // 2, "two blocks a step, and at most as many as may stay"


def test_a_sequence_waits_while_its_engine_lends_what_it_needs(run, group, answer) -> None:
    it = lender(run)
    it.engine.limit_blocks(4)
    message = group(1, [3] * 30, max_tokens=10)
    it.engine.submit(message)
    for _ in range(3):
        stats = it.step().stats
    assert it.engine.starves
    assert (stats.running, stats.block_limit) == (0, 4)
    assert stats.blocks_wanted >= 4
    it.engine.limit_blocks(12)
    it.drain()
    assert not it.engine.starves
    assert it.tokens[1, 0] == answer(message, 0)[0]


def test_a_starved_sequence_ends_by_its_deadline(run, group) -> None:
    it = lender(run)
    it.engine.limit_blocks(1)
    it.engine.submit(group(1, [3] * 30, max_tokens=10, deadline=it.now + 5))
    it.step()
    it.now += 6
    it.step()
    assert it.failed[1].reason == "DEADLINE_EXCEEDED"
    assert not it.engine.has_work


def test_borrowed_blocks_make_no_longer_context(run, group) -> None:
    it = lender(run)
    it.engine.limit_blocks(32)
    it.engine.submit(group(1, [1] * 40, max_tokens=10))
    it.step()
    assert it.failed[1].reason == "CONTEXT_TOO_LONG"


@pytest.mark.parametrize(("asked", "given_"), [(0, 1), (-5, 1), (1000, 32)])
def test_a_limit_out_of_bounds_is_the_nearest_one(run, asked, given_) -> None:
    it = lender(run)
    it.engine.limit_blocks(asked)
    it.step()
    assert it.engine.stats().block_limit == given_


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(1, 32), st.integers(1, 6)), min_size=1, max_size=12),
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 2)), min_size=1, max_size=8),
)
def test_whatever_the_limits_every_answer_is_whole(run, group, answer, changes, prompts) -> None:
    it = lender(run)
    messages = [group(i, [i % 3] * length, 12, priority=p, n=n) for i, (length, p, n) in enumerate(prompts)]
    for message in messages:
        it.engine.submit(message)
    for limit, steps in changes:
        it.engine.limit_blocks(limit)
        for _ in range(steps):
            stats = it.step().stats
            assert stats.blocks_held <= limit
            used = {block for plan in it.ranks.plans[-1:] for table in plan.block_tables for block in table}
            assert not stats.running or max(used) < stats.block_limit
    it.engine.limit_blocks(12)
    it.drain()
    assert it.tokens == {(m.group, c): answer(m, c)[0] for m in messages for c in range(m.sampling.n)}
    assert it.engine.stats().blocks_held == 0


def test_cached_blocks_that_moved_are_found_and_keep_their_order() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.free(blocks[6:])
    pool.free(blocks[:2])
    pool.free(blocks[2:4])
    pool.set_limit(6)
    moves = pool.gather(8)
    assert sorted(moves) == [] or all(target < 6 for target in moves.values())
    assert pool.ceiling == 6
    assert pool.num_held + pool.num_available == 6
    assert pool.find([bytes([4])]) == [4]
    assert sum(bool(pool.find([bytes([block])])) for block in range(8)) == 6
