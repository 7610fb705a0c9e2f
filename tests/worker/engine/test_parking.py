"""Paused sequences come back from a tier: asked for when there is room, waited for a second at most, or computed."""

from __future__ import annotations

import pytest

from ryzanstein.worker.engine.memory.parking import RETURN_S
from ryzanstein.worker.engine.memory.prefix import chain_keys
from ryzanstein.worker.engine.memory.travel import name_of

SIZE, LONG = 4, 160


class Tiered:
    """An engine whose conversations are in a tier, which here keeps every page of tokens that was ever reported."""

    def __init__(self, run, group, *, parks=True) -> None:
        self.it = run(num_blocks=95, block_size=SIZE, max_sequences=2, token_budget=64)
        prompts = [[(7 * i + j * j) % 90 for j in range(LONG)] for i in range(2)]
        given = {"max_tokens": 200, "reports_pages": True, "parks": parks}
        self.messages = [group(i, prompt, **given) for i, prompt in enumerate(prompts)]
        self.pages: dict[bytes, object] = {}
        self.asked: list[tuple[int, int, list[bytes]]] = []
        for message in self.messages:
            self.it.engine.submit(message)

    def step(self) -> None:
        events = self.it.step()
        for _, names in events.sealed:
            for name in names:
                self.it.engine.export_pages(1, [name])
                self.pages[name] = self.it.ranks.slab[0]
        self.asked += events.returning

    def until_asked(self) -> tuple[int, int, list[bytes]]:
        for _ in range(1000):
            self.step()
            if self.asked:
                return self.asked[-1]
        raise AssertionError("nothing was paused and came back")

    def bring_back(self, keys: list[bytes]) -> None:
        parent = b""
        for name in (name_of(key, 0) for key in keys):
            if self.it.engine.find_pages([name]):
                self.it.ranks.slab = {0: self.pages[name]}
                self.it.engine.import_pages(2, [name], parent)
            parent = name


def test_a_paused_sequence_waits_for_its_pages_and_computes_only_what_no_page_has(run, group, answer) -> None:
    tiered = Tiered(run, group)
    group_id, choice, keys = tiered.until_asked()
    message = tiered.messages[group_id]
    whole = message.prompt_ids + tiered.it.tokens[group_id, choice]
    assert keys == chain_keys(whole[:-1], SIZE)
    computed = tiered.it.engine.stats().prefill_tokens
    tiered.step()
    assert tiered.it.engine.stats().prefill_tokens == computed, "it waits"
    tiered.bring_back(keys)
    tiered.it.engine.returned(group_id, choice)
    tiered.it.drain()
    assert tiered.it.engine.stats().prefill_tokens - computed <= SIZE
    assert tiered.it.tokens == {(m.group, 0): answer(m, 0)[0] for m in tiered.messages}


def test_without_an_answer_it_is_computed_after_a_second(run, group, answer) -> None:
    tiered = Tiered(run, group)
    tiered.until_asked()
    tiered.step()
    computed = tiered.it.engine.stats().prefill_tokens
    tiered.it.now += RETURN_S
    tiered.it.drain()
    assert tiered.it.engine.stats().prefill_tokens > computed
    assert len(tiered.asked) == 1
    assert tiered.it.tokens == {(m.group, 0): answer(m, 0)[0] for m in tiered.messages}


def test_others_begin_while_it_waits_but_not_in_its_room(run, group, answer) -> None:
    tiered = Tiered(run, group)
    group_id, choice, keys = tiered.until_asked()
    short, long = group(7, [5] * SIZE, max_tokens=3), group(8, [6] * (80 * SIZE), max_tokens=3)
    tiered.it.engine.submit(short)
    tiered.it.engine.submit(long)
    for _ in range(6):
        tiered.step()
    assert tiered.it.tokens[7, 0] == answer(short, 0)[0]
    assert not tiered.it.tokens.get((8, 0)), "it would take the blocks that the other one needs"
    tiered.bring_back(keys)
    tiered.it.engine.returned(group_id, choice)
    tiered.it.drain()
    assert tiered.it.tokens == {(m.group, 0): answer(m, 0)[0] for m in (*tiered.messages, short, long)}


def test_one_that_is_cancelled_while_it_waits_leaves_nothing(run, group) -> None:
    tiered = Tiered(run, group)
    group_id, choice, _ = tiered.until_asked()
    tiered.it.engine.cancel(group_id)
    tiered.it.engine.returned(group_id, choice)
    tiered.it.drain()
    assert not tiered.it.engine._scheduler.parking.parked


@pytest.mark.parametrize("parks", [False])
def test_what_is_in_no_tier_is_computed_at_once(run, group, answer, parks) -> None:
    tiered = Tiered(run, group, parks=parks)
    for _ in range(2000):
        if not tiered.it.engine.has_work:
            break
        tiered.step()
    assert tiered.it.engine.stats().preemptions > 0
    assert tiered.asked == []
    assert tiered.it.tokens == {(m.group, 0): answer(m, 0)[0] for m in tiered.messages}
