"""Exactly once, under every interleaving of attempts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ryzanstein.generation.tokens import FinishReason, Token
from ryzanstein.router.generations.token_log import AppendResult, GapError, TokenLog


def token(index: int, choice: int = 0) -> Token:
    return Token(100 * choice + index, f"{choice}.{index} ")


def started(num_choices: int = 1) -> TokenLog:
    log = TokenLog(num_choices)
    log.admit(0)
    return log


def test_rows_in_order_are_new_and_repeats_are_dropped() -> None:
    log = started()
    assert [log.append(0, 0, i, token(i), "a") for i in (0, 1, 1, 0, 2)] == [
        AppendResult.NEW, AppendResult.NEW, AppendResult.DUPLICATE, AppendResult.DUPLICATE, AppendResult.NEW,
    ]  # fmt: skip
    assert log.choices[0].tokens == [token(0), token(1), token(2)]
    assert log.num_tokens == 3


def test_a_skipped_index_is_a_protocol_error_and_changes_nothing() -> None:
    log = started()
    with pytest.raises(GapError, match="index 1 after 0"):
        log.append(0, 0, 1, token(1), "a")
    assert log.choices[0].tokens == []


def test_a_choice_that_was_not_asked_for_is_a_protocol_error() -> None:
    log = started(2)
    with pytest.raises(GapError, match="choice 2 of 2"):
        log.append(0, 2, 0, token(0), "a")
    with pytest.raises(GapError, match="choice 2 of 2"):
        log.finish(0, 2, FinishReason.STOP)


def test_output_of_an_older_attempt_is_dropped() -> None:
    log = started()
    log.append(0, 0, 0, token(0), "a")
    log.fence(0)
    log.admit(1)
    assert log.append(0, 0, 1, token(1), "a") is AppendResult.FENCED
    assert log.finish(0, 0, FinishReason.STOP) is AppendResult.FENCED
    assert log.append(1, 0, 1, token(1), "b") is AppendResult.NEW


def test_in_a_race_the_first_new_row_wins_and_fences_off_the_other() -> None:
    log = started()
    log.append(0, 0, 0, token(0), "a")
    log.admit(1)
    assert log.append(0, 0, 0, token(0), "a") is AppendResult.DUPLICATE
    assert log.live == {0, 1}
    assert log.append(1, 0, 1, token(1), "b") is AppendResult.NEW
    assert log.live == {1}
    assert log.append(0, 0, 1, token(1), "a") is AppendResult.FENCED


def test_an_end_wins_a_race_too() -> None:
    log = started()
    log.admit(1)
    assert log.finish(1, 0, FinishReason.STOP) is AppendResult.NEW
    assert log.live == {1}
    assert log.complete


def test_a_finished_choice_takes_nothing_more() -> None:
    log = started(2)
    log.append(0, 0, 0, token(0), "a")
    log.finish(0, 0, FinishReason.LENGTH)
    assert log.append(0, 0, 1, token(1), "a") is AppendResult.DUPLICATE
    assert log.finish(0, 0, FinishReason.STOP) is AppendResult.DUPLICATE
    assert log.choices[0].reason is FinishReason.LENGTH
    assert not log.complete


def test_the_next_attempt_learns_what_each_choice_has() -> None:
    log = started(3)
    log.append(0, 1, 0, token(0, 1), "a")
    log.finish(0, 1, FinishReason.STOP)
    log.append(0, 2, 0, token(0, 2), "a")
    assert [(choice.token_ids, choice.finished) for choice in log.progress] == [((), False), ((100,), True), ((200,), False)]


def test_cancel_ends_what_runs_and_keeps_what_has_ended() -> None:
    log = started(2)
    log.finish(0, 0, FinishReason.STOP)
    assert log.cancel() == [1]
    assert [choice.reason for choice in log.choices] == [FinishReason.STOP, FinishReason.CANCELLED]
    assert log.complete
    assert log.live == frozenset()


@given(
    nodes=st.lists(st.sampled_from("abc"), max_size=30),
    first=st.integers(0, 30),
    most=st.integers(1, 8),
)
def test_runs_cover_every_token_once_with_the_node_that_gave_it(nodes: list[str], first: int, most: int) -> None:
    log = started()
    for index, node_id in enumerate(nodes):
        log.append(0, 0, index, token(index), node_id)
    runs = log.choices[0].runs(first, most)
    flat = [(start + i, tok, node) for start, tokens, node in runs for i, tok in enumerate(tokens)]
    assert flat == [(i, token(i), nodes[i]) for i in range(first, len(nodes))]
    assert all(len(tokens) <= most for _, tokens, _ in runs)


class Attempts(RuleBasedStateMachine):
    """Attempts that start at the log's end, advance, repeat themselves, die and race in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog(1)
        self.next_attempt = 0
        self.positions: dict[int, int] = {}
        self.seen: list[int] = []

    @rule()
    def start(self) -> None:
        self.log.admit(self.next_attempt)
        self.positions[self.next_attempt] = len(self.log.choices[0].tokens)
        self.next_attempt += 1

    @precondition(lambda self: self.positions)
    @rule(pick=st.integers(0, 100), repeat=st.integers(0, 3))
    def advance(self, pick: int, repeat: int) -> None:
        attempt = sorted(self.positions)[pick % len(self.positions)]
        for index in range(max(0, self.positions[attempt] - repeat), self.positions[attempt] + 1):
            row = self.log.append(attempt, 0, index, token(index), f"n{attempt}")
            if row is AppendResult.NEW:
                self.seen.append(index)
        self.positions[attempt] += 1

    @precondition(lambda self: self.log.live)
    @rule()
    def die(self) -> None:
        self.log.fence(min(self.log.live))

    @invariant()
    def every_index_once(self) -> None:
        assert self.seen == list(range(len(self.seen)))
        assert self.log.choices[0].tokens == [token(i) for i in range(len(self.seen))]


TestAttempts = Attempts.TestCase
