"""Every index is judged on arrival."""

from __future__ import annotations

from ryzanstein.lab.clients.reading import AnswerReading, Piece


def test_indices_in_order_are_neither_lost_nor_repeated() -> None:
    reading = AnswerReading("greedy")
    reading.take(Piece(0, 0, [1, 2], "a"))
    reading.take(Piece(0, 2, [3], "b"))
    assert (reading.num_lost, reading.num_repeated, reading.next_index) == (0, 0, {0: 3})
    assert (reading.choices[0].tokens, reading.choices[0].text) == ([1, 2, 3], "ab")


def test_a_gap_is_lost_tokens_and_is_not_made_good_by_what_comes_after() -> None:
    reading = AnswerReading("greedy")
    reading.take(Piece(0, 0, [1]))
    reading.take(Piece(0, 3, [4]))
    assert reading.num_lost == 2
    reading.take(Piece(0, 1, [2, 3]))
    assert (reading.num_lost, reading.num_repeated) == (2, 2)


def test_what_was_there_already_is_repeated_and_not_counted_as_new() -> None:
    reading = AnswerReading("greedy")
    reading.take(Piece(0, 0, [1, 2, 3], logprobs=[-1.0, -2.0, -3.0]))
    reading.take(Piece(0, 2, [3, 4], logprobs=[-3.0, -4.0]))
    assert reading.num_repeated == 1
    assert reading.choices[0].tokens == [1, 2, 3, 4]
    assert reading.choices[0].logprobs == [-1.0, -2.0, -3.0, -4.0]


def test_choices_have_indices_of_their_own() -> None:
    reading = AnswerReading("n3", num_choices=2)
    reading.take(Piece(1, 0, [9]))
    reading.take(Piece(0, 0, [1, 2]))
    assert reading.next_index == {1: 1, 0: 2}
    assert reading.num_lost == reading.num_repeated == 0


def test_it_is_complete_when_every_choice_has_finished() -> None:
    reading = AnswerReading("n3", num_choices=2)
    reading.finished(0, "stop")
    assert not reading.complete
    reading.finished(1, "length")
    assert reading.complete


def test_finishing_again_otherwise_is_a_repetition() -> None:
    reading = AnswerReading("greedy")
    reading.finished(0, "stop")
    reading.finished(0, "stop")
    assert reading.num_repeated == 0
    reading.finished(0, "length")
    assert reading.num_repeated == 1
