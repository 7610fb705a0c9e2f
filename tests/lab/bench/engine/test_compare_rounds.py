from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from ryzanstein.lab.bench.engine.compare.rounds import Change, compare_rounds, enough_rounds


def interval_by_enumeration(before: list[float], after: list[float], error: float) -> tuple[float, float]:
    """From the definition: every split of the ranks is equally likely when nothing changed."""
    n, m = len(before), len(after)
    statistics_of_splits = [
        sum(after_rank > rank for after_rank in split for rank in range(n + m) if rank not in split)
        for split in itertools.combinations(range(n + m), m)
    ]
    k = 0
    while sum(value <= k for value in statistics_of_splits) / len(statistics_of_splits) <= error / 2:
        k += 1
    quotients = sorted(b / a for a in before for b in after)
    return quotients[k - 1], quotients[n * m - k]


@pytest.mark.parametrize(("n", "m", "error"), [(4, 4, 0.05), (5, 4, 0.05), (6, 5, 0.01), (7, 6, 0.002), (3, 9, 0.1)])
def test_the_interval_is_that_of_the_exact_rank_test(n: int, m: int, error: float) -> None:
    choose = random.Random(n * 100 + m)
    before, after = ([choose.lognormvariate(0, 0.1) for _ in range(size)] for size in (n, m))
    change = compare_rounds(before, after, error)
    assert (change.low, change.high) == pytest.approx(interval_by_enumeration(before, after, error))
    assert change.factor == pytest.approx(statistics.median(b / a for a in before for b in after))


def test_the_two_directions_are_each_others_inverse() -> None:
    before, after = [1.0, 1.1, 0.9, 1.2, 1.05], [1.5, 1.4, 1.3, 1.6, 1.45]
    there, back = compare_rounds(before, after, 0.05), compare_rounds(after, before, 0.05)
    assert there.factor == pytest.approx(1 / back.factor)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))


def test_the_interval_misses_the_true_factor_no_more_often_than_it_says() -> None:
    choose = random.Random(1)
    missed = 0
    for _ in range(2000):
        before = [choose.lognormvariate(0, 0.2) for _ in range(6)]
        after = [1.3 * choose.lognormvariate(0, 0.2) for _ in range(6)]
        change = compare_rounds(before, after, 0.05)
        missed += not change.low <= 1.3 <= change.high
    assert missed <= 0.05 * 2000 + 3 * math.sqrt(0.05 * 0.95 * 2000)


@pytest.mark.parametrize("error", [0.3, 0.05, 0.01, 0.001, 1e-6])
def test_enough_rounds_are_the_least_that_have_an_interval(error: float) -> None:
    rounds = enough_rounds(error)
    assert compare_rounds([1.0] * rounds, [1.0] * rounds, error).factor == 1
    with pytest.raises(ValueError, match="rounds have no interval"):
        compare_rounds([1.0] * (rounds - 1), [1.0] * (rounds - 1), error)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (Change(1.2, 1.1, 1.3), "slower"),
        (Change(1.04, 1.03, 1.045), "same"),
        (Change(1.2, 0.99, 1.4), "unclear"),
        (Change(1.04, 1.01, 1.06), "unclear"),
        (Change(1.0, 0.97, 1.03), "same"),
        (Change(0.8, 0.7, 0.9), "faster"),
        (Change(0.8, 0.6, 1.01), "unclear"),
    ],
)
def test_a_change_counts_when_it_is_large_enough_and_outside_of_the_noise(change: Change, verdict: str) -> None:
    assert change.verdict(0.05) == verdict
