"""What is concluded from measured steps and lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.engine.scheduling.pace import StepPace


def measured(steps, noise_s: float = 0.0, base_s: float = 0.01, token_s: float = 0.0002) -> StepPace:
    pace, dice = StepPace(), random.Random(3)
    for num_prefill in steps:
        pace.step(num_prefill, base_s + token_s * num_prefill + dice.uniform(-noise_s, noise_s))
    return pace


def test_the_cost_of_a_step_and_of_a_prompt_token_are_distinguished() -> None:
    pace = measured([0, 0, 40, 0, 7, 0, 0, 120] * 20, noise_s=0.001)
    assert pace.decode_step_s == pytest.approx(0.01, rel=0.1)
    assert pace.prefill_token_s == pytest.approx(0.0002, rel=0.1)
    assert pace.prefill_s(100, room=50) == pytest.approx(2 * 0.01 + 100 * 0.0002, rel=0.1)


def test_they_are_distinguished_when_every_step_carries_prompts() -> None:
    pace = measured([10, 20, 30, 40] * 30, noise_s=0.0005)
    assert pace.prefill_token_s == pytest.approx(0.0002, rel=0.2)


def test_a_slower_engine_is_noticed(group) -> None:
    pace = measured([0, 30] * 100)
    for num_prefill in [0, 30] * 150:
        pace.step(num_prefill, 0.05 + 0.001 * num_prefill)
    assert pace.decode_step_s == pytest.approx(0.05, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 4096), st.floats(0, 10)), max_size=60))
def test_no_cost_is_ever_negative_whatever_was_measured(steps) -> None:
    pace = StepPace()
    for num_prefill, duration_s in steps:
        pace.step(num_prefill, duration_s)
    assert min(pace.step_s, pace.decode_step_s, pace.prefill_token_s, pace.prefill_s(100, 10)) >= 0


def test_a_few_steps_are_not_enough() -> None:
    assert not measured([0] * 7).known
    assert measured([0] * 8).known


def test_lengths_that_always_use_what_they_may_are_regular() -> None:
    pace = StepPace()
    for num in (5, 50, 500) * 20:
        pace.end(num, num)
    assert (pace.mean_share, pace.irregularity) == pytest.approx((1.0, 0.0))


def test_lengths_by_chance_are_irregular() -> None:
    pace, dice = StepPace(), random.Random(5)
    for _ in range(500):
        pace.end(int(dice.expovariate(1 / 100)), 4000)
    assert pace.irregularity > 0.5
    assert pace.mean_length == pytest.approx(100, rel=0.5)
