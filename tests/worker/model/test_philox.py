"""Philox against the known answers that its authors publish with Random123 (tests/kat_vectors)."""

import numpy as np
import pytest

from ryzanstein.worker.kernels.functions.draw import philox4x32, uniform

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_words_are_the_published_ones(counter: list[int], key: list[int], answer: list[int]) -> None:
    words = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert words.tolist() == [answer]


def test_rows_do_not_disturb_each_other() -> None:
    counters, keys, answers = (np.array(column, np.uint32) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert (philox4x32(counters, keys) == answers).all()


def test_uniform_is_made_of_the_first_two_words() -> None:
    (drawn,) = uniform([0], [0], [0])
    assert drawn == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_seed_choice_and_index_each_change_the_draw() -> None:
    drawn = uniform([7, 8, 7, 7, 7 + 2**32], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0])
    assert len(set(drawn.tolist())) == 5


def test_uniform_numbers_lie_in_range_and_fill_it_evenly() -> None:
    drawn = uniform([3] * 20_000, [0] * 20_000, list(range(20_000)))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
