"""A campaign's time is shared by the number of runs; what is not used goes to the rest."""

from __future__ import annotations

import pytest

from ryzanstein.lab.chaos import timetable
from ryzanstein.lab.chaos.timetable import Timetable


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(timetable.time, "monotonic", lambda: now[0])
    return now


def test_shares_follow_the_runs(clock: list[float]) -> None:
    table = Timetable(100.0)
    table.begin(1, 4)
    clock[0] += 24.9
    assert not table.is_over
    clock[0] += 0.1
    assert table.is_over
    clock[0] += 15.0  # it was late
    table.begin(1, 3)
    clock[0] += 19.9
    assert not table.is_over
    table.begin(2, 2)  # and the next may have all that is left
    clock[0] += 40.0
    assert not table.is_over
    clock[0] += 0.2
    assert table.is_over


def test_without_a_limit_nothing_is_ever_over(clock: list[float]) -> None:
    table = Timetable(None)
    table.begin(1, 4)
    clock[0] += 1e9
    assert not table.is_over


def test_nothing_left_is_over_at_once(clock: list[float]) -> None:
    table = Timetable(10.0)
    clock[0] += 11.0
    table.begin(0, 0)
    assert table.is_over
