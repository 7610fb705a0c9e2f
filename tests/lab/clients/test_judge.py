"""A laboratory that cannot see a lost token is worthless: it is fed lost, repeated and changed answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ryzanstein.lab.clients.judge import judge
from ryzanstein.lab.clients.reading import AnswerReading, Piece

TOKENS = [11, 12, 13, 14]


def answer(tokens: list[int] = TOKENS, text: str = "abcd", reason: str = "stop", shift: float = 0.0) -> AnswerReading:
    reading = AnswerReading("greedy", generation_id="g")
    for index, token in enumerate(tokens):
        reading.take(Piece(0, index, [token], text[index : index + 1], [-0.5 - index + shift], "node-0"))
    reading.finished(0, reason)
    reading.prompt_tokens, reading.completion_tokens = 7, len(tokens)
    return reading


UNDISTURBED = answer()


def test_the_same_answer_is_flawless() -> None:
    assert judge(UNDISTURBED, answer()).flawless
    assert judge(UNDISTURBED, answer(shift=0.0005)).flawless


def test_a_gap_in_the_middle_is_lost() -> None:
    seen = answer([])
    seen.choices[0].reason = ""
    seen.take(Piece(0, 0, TOKENS[:1], "a", [-0.5]))
    seen.take(Piece(0, 2, TOKENS[2:], "cd", [-2.5, -3.5]))
    seen.finished(0, "stop")
    verdict = judge(UNDISTURBED, seen)
    assert verdict.lost == 1
    assert not verdict.flawless


def test_an_end_that_never_came_is_lost() -> None:
    verdict = judge(UNDISTURBED, answer(TOKENS[:2], "ab"))
    assert verdict.lost == 2
    assert any("text" in what for what in verdict.differences)


def test_a_repeated_token_is_seen() -> None:
    seen = answer()
    seen.take(Piece(0, 3, TOKENS[3:], "", [-3.5]))
    verdict = judge(UNDISTURBED, seen)
    assert (verdict.lost, verdict.repeated, verdict.flawless) == (0, 1, False)


def _another_usage() -> AnswerReading:
    seen = answer()
    seen.completion_tokens += 1
    return seen


def _a_missing_choice() -> AnswerReading:
    seen = answer()
    seen.choices[1] = seen.choices.pop(0)
    return seen


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (lambda: answer([11, 99, 13, 14]), "token 1 is 99, not 12"),
        (lambda: answer([*TOKENS, 15], "abcd"), "5 tokens, not 4"),
        (lambda: answer(text="abXd"), "the text differs"),
        (lambda: answer(shift=0.01), "log probabilities differ"),
        (lambda: answer(reason="length"), "finished by length, not stop"),
        (_another_usage, "usage is (7, 5), not (7, 4)"),
        (_a_missing_choice, "finished by nothing"),
    ],
)
def test_a_changed_answer_is_seen(seen: Callable[[], AnswerReading], says: str) -> None:
    verdict = judge(UNDISTURBED, seen())
    assert not verdict.flawless
    assert any(says in what for what in verdict.differences), verdict


def test_of_a_failed_answer_what_came_is_judged_and_the_rest_is_a_failure() -> None:
    part = AnswerReading("greedy", generation_id="g")
    part.take(Piece(0, 0, TOKENS[:2], "ab", [-0.5, -1.5]))
    part.failure = "UNAVAILABLE"
    verdict = judge(UNDISTURBED, part)
    assert (verdict.failed, verdict.lost, verdict.differences) == (True, 0, ())
    wrong = AnswerReading("greedy", generation_id="g")
    wrong.take(Piece(0, 0, [11, 99], "ab", [-0.5, -1.5]))
    assert judge(UNDISTURBED, wrong).differences


def test_an_answer_that_is_not_complete_has_failed_even_if_nobody_says_so() -> None:
    seen = answer()
    seen.choices[0].reason = ""
    assert judge(UNDISTURBED, seen).failed
