"""When tokens came: all of them are counted, gaps stay, and there is a bound."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.console.answers.timeline import MOST_SAMPLES, Timeline


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans(), st.integers(0, 9)), max_size=3000))
def test_every_token_is_counted_with_its_part_in_few_samples(steps: list[tuple[int, bool, int]]) -> None:
    timeline, at, part, told = Timeline(), 0, 0, dict[int, int]()
    for later, moves, tokens in steps:
        at, part = at + later, min(part + moves, 50)
        timeline.add(at, part, tokens)
        told[part] = told.get(part, 0) + tokens
    assert len(timeline.samples) <= MOST_SAMPLES
    for number, tokens in told.items():
        assert sum(count for _, of, count in timeline.samples if of == number) == tokens
    assert all(before[0] <= after[0] and before[1] <= after[1] for before, after in pairwise(timeline.samples))


def test_the_gap_of_a_failover_stays_however_long_the_answer_is() -> None:
    timeline = Timeline()
    for number in range(20_000):
        timeline.add(number * 10 + (5000 if number >= 10_000 else 0), int(number >= 10_000), 1)
    (gap,) = [after[0] - before[0] for before, after in pairwise(timeline.samples) if before[1] != after[1]]
    assert 5000 <= gap <= 6000
    assert len(timeline.samples) > MOST_SAMPLES / 4


def test_an_answer_that_moves_at_each_token_is_bounded_too() -> None:
    timeline = Timeline()
    for number in range(5 * MOST_SAMPLES):
        timeline.add(number, number, 1)
    assert len(timeline.samples) <= MOST_SAMPLES
    assert sum(count for _, _, count in timeline.samples) == 5 * MOST_SAMPLES
