"""What is computed of a router's histograms."""

from __future__ import annotations

import pytest

from ryzanstein.survey.views import Distribution

FIRST = Distribution((0.1, 0.2, 0.4), (10, 30, 40, 41), 9.0)


def test_a_quantile_is_that_of_prometheus() -> None:
    assert FIRST.quantile(0.5) == pytest.approx(0.1 + 0.1 * (20.5 - 10) / 20)
    assert FIRST.quantile(0.0) == 0.0
    assert FIRST.quantile(1.0) == 0.4  # above the last bound nothing is known
    assert Distribution().quantile(0.5) is None


def test_a_difference_is_of_one_start() -> None:
    later = Distribution((0.1, 0.2, 0.4), (10, 40, 50, 51), 12.0)
    assert later.since(FIRST) == Distribution((0.1, 0.2, 0.4), (0, 10, 10, 10), 3.0)
    assert FIRST.since(later) == FIRST  # the counts began again
    assert later.since(Distribution()) == later
