"""The open vocabulary: two disjoint halves of words that fit a terminal."""

from random import Random

import pytest

from ryzanstein.lab.demo.words import Split, Words, split_of


@pytest.mark.parametrize("split", list(Split))
def test_invented_words_belong_to_their_split(split: Split) -> None:
    words = Words(Random(1), split)
    assert {split_of(words.invented()) for _ in range(500)} == {split}


def test_capitals_do_not_change_the_split_of_a_word() -> None:
    assert split_of("Tavik") is split_of("tavik") is split_of("TAVIK")


def test_an_ordinary_name_belongs_to_one_split_only() -> None:
    ordinary = ["Ada", "Alan", "Grace", "Linus", "Edsger"]
    drawn = {split: {Words(Random(seed), split).proper(ordinary) for seed in range(2000)} & set(ordinary) for split in Split}
    assert not drawn[Split.TRAIN] & drawn[Split.HELD_OUT]
    assert drawn[Split.TRAIN]


def test_invented_words_are_short_lower_case_letters() -> None:
    words = Words(Random(2), Split.TRAIN)
    for _ in range(500):
        word = words.invented()
        assert word.isascii()
        assert word.isalpha()
        assert word.islower()
        assert 2 <= len(word) <= 12


def test_numbers_have_at_most_five_digits() -> None:
    words = Words(Random(3), Split.TRAIN)
    assert all(0 <= int(words.number()) < 100_000 for _ in range(500))
