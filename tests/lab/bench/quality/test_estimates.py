"""Against the textbook's formulas for windows of equal length, and against many draws for those of unequal length."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ryzanstein.lab.bench.quality.document import GreedyMatch, WindowSums
from ryzanstein.lab.bench.quality.estimates import (
    added_loss,
    equal_beginning,
    over_texts,
    per_token,
    perplexity,
    same_greedy,
)


def test_windows_of_equal_length_have_the_standard_error_of_their_means() -> None:
    means = [2.0, 2.5, 1.0, 4.0, 3.0]
    found = per_token([mean * 50 for mean in means], [50] * 5)
    assert found.mean == pytest.approx(statistics.mean(means))
    assert found.error == pytest.approx(statistics.stdev(means) / math.sqrt(5))


def test_the_error_of_unequal_windows_is_the_spread_of_many_samples() -> None:
    draw = random.Random(0)

    def sample() -> tuple[list[float], list[int]]:
        counts = [draw.choice((100, 400)) for _ in range(40)]
        return [count * draw.gauss(3, 0.5) for count in counts], counts

    found = [per_token(*sample()) for _ in range(2000)]
    spread = statistics.stdev(each.mean for each in found)
    assert statistics.mean(each.error for each in found) == pytest.approx(spread, rel=0.1)


def test_one_window_has_no_error_bar() -> None:
    assert per_token([6.0], [3]).mean == 2
    assert math.isnan(per_token([6.0], [3]).error)


def windows(losses: list[float], shift: float = 0.0) -> list[WindowSums]:
    return [WindowSums(10, 10 * (loss + shift), 0.0, 5) for loss in losses]


def test_what_is_hard_in_a_window_for_both_is_not_in_the_error_of_their_difference() -> None:
    losses = [1.0, 3.0, 2.0, 5.0]
    found = added_loss(windows(losses, 0.01), windows(losses))
    assert found.mean == pytest.approx(0.01)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert perplexity(windows(losses)).error > 1


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    losses = [math.log(4.0), math.log(9.0)]
    assert perplexity(windows(losses)).mean == pytest.approx(6)
    assert perplexity(windows(losses)).error == pytest.approx(6 * statistics.stdev(losses) / math.sqrt(2))


def test_texts_have_equal_weights() -> None:
    found = over_texts([per_token([1.0, 3.0], [1, 1]), per_token([10.0] * 100, [1] * 100)])
    assert found.mean == 6
    assert found.error == pytest.approx(1 / 2)


def test_greedy_answers_are_means_over_prompts() -> None:
    matches = [GreedyMatch(64, 64), GreedyMatch(0, 32)]
    assert equal_beginning(matches).mean == 32
    assert same_greedy(matches, 64).mean == 0.75
