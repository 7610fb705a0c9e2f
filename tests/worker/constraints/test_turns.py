"""Slow masks are computed beside the steps, each group in its turn, and are the same masks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.masks import StepMasks
from ryzanstein.worker.constraints.matching import Bits, GrammarState, TokenPatience
from ryzanstein.worker.constraints.table import Words
from ryzanstein.worker.constraints.turns import MASKS_S, QUICK_S, MaskTurn, MaskTurns
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.tokenizer import TextModel


@dataclass(eq=False)
class Choice:
    """Takes so much of its group's time for a mask, and notes the order."""

    group: TokenPatience
    order: list[Choice]
    cost_s: float = 0.1
    held: threading.Event = field(default_factory=threading.Event)

    def compute(self, words: Words) -> None:
        assert self.held.wait(20)
        self.group.used_s += self.cost_s
        self.order.append(self)
        words.fill(7)


def choices(group: TokenPatience, order: list[Choice], count: int) -> list[Choice]:
    made = [Choice(group, order) for _ in range(count)]
    for each in made:
        each.held.set()
    return made


def begun(turns: MaskTurns, *those: Choice) -> list[MaskTurn]:
    """All of them wait before the first is computed."""
    first = Choice(TokenPatience(), [])
    waiting = [turns.begin(first), *(turns.begin(each) for each in those)]
    first.held.set()
    return waiting[1:]


def test_the_group_that_has_taken_least_is_next() -> None:
    turns, order = MaskTurns(4, 1), []
    many, few = choices(TokenPatience(), order, 6), choices(TokenPatience(), order, 2)
    waiting = begun(turns, *many, *few)
    assert all(turn.done.wait(20) for turn in waiting)
    assert {order.index(each) for each in few} <= {0, 1, 2, 3}, "not behind the six"


def test_a_group_that_comes_later_does_not_owe_what_it_never_took() -> None:
    """It begins where the others are, and does not hold them up until it has taken as much."""
    turns, order = MaskTurns(4, 1), []
    old, new = TokenPatience(), TokenPatience()
    old.used_s = 100.0
    (turn,) = begun(turns, *choices(old, order, 1))
    assert turn.done.wait(20)
    waiting = begun(turns, *choices(new, order, 3), *choices(old, order, 3))
    assert all(turn.done.wait(20) for turn in waiting)
    groups = [each.group is new for each in order[1:]]
    assert groups[:4].count(True) < 4


def test_what_cannot_wait_is_computed_at_once_and_what_is_forgotten_never() -> None:
    turns, order = MaskTurns(4, 1), []
    blocked, urgent, forgotten = Choice(TokenPatience(), order), *choices(TokenPatience(), order, 2)
    first = turns.begin(blocked)
    turn, gone = turns.begin(urgent), turns.begin(forgotten)
    del forgotten
    assert list(turns.finish(turn)) == [7] * 4
    assert (order, turns.pending) == ([urgent], True)
    blocked.held.set()
    assert first.done.wait(20)
    assert gone.done.wait(20)
    while turns.pending:
        time.sleep(0.001)
    assert order == [urgent, blocked]


@pytest.mark.parametrize(
    ("num_rows", "step_s", "share_s"), [(1, 0.0, 2 * MASKS_S), (4, 0.0, MASKS_S / 2), (64, 0.0, QUICK_S), (64, 0.2, 0.2 / 64)]
)
def test_the_rows_of_a_step_share_its_time(num_rows: int, step_s: float, share_s: float) -> None:
    turns = MaskTurns(4, 2)
    turns.share(num_rows, step_s)
    assert turns.is_slow(share_s * 1.01)
    assert not turns.is_slow(share_s * 0.99)


def test_masks_that_are_computed_ahead_are_the_same(text_model: TextModel) -> None:
    table = token_table(text_model)
    tokenizer, bits = table.tokenizer(), Bits(table)
    masks = StepMasks(len(table.tokens), 1)
    masks.turns.is_slow = lambda mask_s: True  # type: ignore[method-assign]
    matcher = compiled(Constraint.regex("(ab|ba){3,9}"), table, tokenizer)
    ahead, usual = (GrammarState(matcher.deep_copy(), bits, (), turns=turns) for turns in (masks.turns, None))
    for letter in b"abbaab":
        rows = [SampleRow(SamplingParams(), 0, 0, [], [], constraint=state) for state in (ahead, usual)]
        masks.begin(rows)
        words_SW = masks.wait()
        assert words_SW is not None
        assert np.array_equal(words_SW[0], words_SW[1])
        for state in (ahead, usual):
            state.accept(table.tokens.index(bytes([letter])))
        assert not ahead.failure
        while not ahead.ready:
            time.sleep(0.001)
    assert masks.turns.computed_s > 0
