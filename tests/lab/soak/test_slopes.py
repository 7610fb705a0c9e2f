"""Growth of what is sampled for hours."""

from __future__ import annotations

import numpy as np
import pytest

from ryzanstein.lab.soak.report import missed
from ryzanstein.lab.soak.slopes import Slope, slope_of
from ryzanstein.lab.soak.strikes import STRIKES, order

TIMES = [10.0 * number for number in range(660)]


def noisy(growth_per_hour: float, seed: int) -> list[float]:
    """100 that grows, with noise that stays for a minute, and outliers."""
    rng = np.random.default_rng(seed)
    noise = np.repeat(rng.normal(0, 1.0, len(TIMES) // 6 + 1), 6)[: len(TIMES)]
    values = 100 * (1 + growth_per_hour * np.asarray(TIMES) / 3600) + noise
    values[rng.integers(0, len(TIMES), 20)] += 50
    return [float(value) for value in values]


@pytest.mark.parametrize("seed", range(4))
def test_a_leak_is_seen_and_noise_is_not(seed: int) -> None:
    leak, still = slope_of(TIMES, noisy(0.03, seed)), slope_of(TIMES, noisy(0.0, seed))
    assert leak is not None
    assert still is not None
    assert leak.per_hour == pytest.approx(0.03, abs=0.006)
    assert still.lower < 0 < still.upper
    assert missed("router-0 files", leak, 1.8)
    assert not missed("router-0 files", still, 1.8)


def test_steps_that_stay_are_a_slope_and_a_step_at_the_start_is_not() -> None:
    climbing = slope_of(TIMES, [100.0 + number // 60 for number in range(len(TIMES))])
    warmed = slope_of(TIMES, [90.0] * 20 + [100.0] * (len(TIMES) - 20))
    assert climbing is not None
    assert climbing.per_hour > 0.05
    assert warmed is not None
    assert warmed.per_hour == 0


def test_what_is_always_0_or_was_seldom_seen_has_no_slope() -> None:
    assert slope_of(TIMES, [0.0] * len(TIMES)) is None
    assert slope_of(TIMES, [float("nan")] * (len(TIMES) - 5) + [1.0] * 5) is None


def test_what_goes_with_the_load_counts_by_its_lowest_value() -> None:
    rng = np.random.default_rng(1)
    load = [float(64 + value) for value in rng.integers(0, 200, len(TIMES)) * (1 + np.asarray(TIMES) / 7200)]
    load[::10] = [64.0] * len(load[::10])
    held = [low + number // 60 for number, low in enumerate(load)]
    rising, comes_down, leaks = (slope_of(TIMES, load), slope_of(TIMES, load, lowest=True), slope_of(TIMES, held, lowest=True))
    assert rising is not None
    assert comes_down is not None
    assert leaks is not None
    assert missed("node-1 blocks held", rising, 1.8)
    assert comes_down.per_hour == pytest.approx(0, abs=0.01)
    assert leaks.lower > 0.05


def test_ten_minutes_prove_only_what_is_certain() -> None:
    noise, growth = Slope(1.0, 0.02, -0.1, 0.2), Slope(1.0, 0.7, 0.5, 0.9)
    assert not missed("router-0 files", noise, 0.125)
    assert missed("router-0 files", growth, 0.125)
    assert not missed("router-0 series", growth, 0.125)
    assert missed("router-0 series", growth, 1.8)


def test_every_strike_comes_once_before_any_comes_again() -> None:
    following = order(3)
    first, second = ([following().name for _ in STRIKES] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(strike.name for strike in STRIKES)
