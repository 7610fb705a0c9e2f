"""Whose fault it is when a row's logits are no numbers."""

from __future__ import annotations

import pytest

from ryzanstein.errors import Code
from ryzanstein.worker.engine.outcome import RanksUnsound

POISON = 13


def test_a_prompt_that_leads_to_no_numbers_fails_alone(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=32)
    it.ranks.failing = lambda row: POISON in row.prompt_ids
    messages = [group(1, [1] * 6), group(2, [2, POISON, 2]), group(3, [3] * 9)]
    for message in messages:
        it.engine.submit(message)
    it.drain()
    failed = it.failed.pop(2)
    assert (failed.code, failed.reason) == (Code.INTERNAL, "LOGITS_NOT_FINITE")
    assert it.failed == {}
    assert it.tokens == {(m.group, 0): answer(m, 0)[0] for m in (messages[0], messages[2])}


def test_ranks_that_answer_nothing_are_unsound(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1] * 6))
    it.step()
    it.ranks.failing = lambda row: True
    with pytest.raises(RanksUnsound, match="logits are not numbers"):
        it.step()


def test_one_sound_token_is_enough(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.ranks.failing = lambda row: row.prompt_ids != [0]
    it.engine.submit(group(1, [1] * 6))
    it.drain()
    assert it.failed[1].reason == "LOGITS_NOT_FINITE"


def test_the_probe_writes_to_no_block_that_another_sequence_reads(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=64)
    shared = list(range(20, 36))
    good, bad = group(1, [*shared, 1], max_tokens=30), group(2, [*shared, POISON], max_tokens=30)
    it.engine.submit(good)
    it.step()
    it.ranks.failing = lambda row: POISON in row.prompt_ids
    it.engine.submit(bad)
    it.drain()
    later = group(3, [*shared, 3], max_tokens=30)
    it.engine.submit(later)
    it.drain()
    assert set(it.failed) == {2}
    assert it.tokens == {(m.group, 0): answer(m, 0)[0] for m in (good, later)}


def test_a_probe_without_memory_blames_nobody(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.ranks.failing = lambda row: True

    def short(plan) -> bool:
        return plan.num_new == [1]

    it.ranks.short = short
    it.engine.submit(group(1, [1] * 6))
    it.step()
    assert it.failed[1].reason == "LOGITS_NOT_FINITE"
