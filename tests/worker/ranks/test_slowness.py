"""Which rank is slow, from what the board says of all."""

from __future__ import annotations

import pytest

from ryzanstein.worker.ranks.health.slowness import SlowBounds, Slowness
from ryzanstein.worker.supervision.group import RankProgress


class Group:
    """Ranks that compute for some seconds per step, and wait for each other the rest of it; ten steps a second, unless idle."""

    def __init__(self, *computing_s: float, **bounds: float) -> None:
        self.slowness = Slowness(SlowBounds(**bounds))
        self.computing_s = list(computing_s)
        self.steps = 0
        self.compute_s = [0.0] * len(computing_s)
        self.in_steps_s = 0.0
        self.now = 50.0

    def run(self, seconds: float, *, idle: bool = False, step_s: float = 0.1):
        """What was found last. A step takes `step_s`."""
        found = None
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if not idle:
                self.steps += 1
                self.in_steps_s += step_s
                self.compute_s = [total + own for total, own in zip(self.compute_s, self.computing_s, strict=True)]
            ranks = [
                RankProgress(i, 1, self.steps, 0, "idle", self.now, 0.0, 1, 0.01, self.in_steps_s - compute_s, compute_s)
                for i, compute_s in enumerate(self.compute_s)
            ]
            found = self.slowness.observe(self.now, ranks) or found
        return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_computes_twenty_times_as_long_is_named(size: int) -> None:
    group = Group(*[0.002] * (size - 1), 0.04, warn_s=5.0)
    assert group.run(4.0) is None
    found = group.run(3.0)
    assert found.rank == size - 1
    assert found.ratio == pytest.approx(20.0)
    assert f"rank {size - 1} computes 20.0 times as long" in str(found)
    assert not group.slowness.is_too_long(found)
    assert group.slowness.is_too_long(group.run(60.0))


def test_ranks_that_differ_a_little_are_not_slow() -> None:
    group = Group(0.002, 0.005, 0.003)
    assert group.run(120.0) is None
    assert group.slowness.ratios[1] == pytest.approx(2.0)


def test_a_gap_of_microseconds_is_not_slow_whatever_the_ratio() -> None:
    assert Group(0.00001, 0.0003).run(120.0) is None


def test_slow_for_a_moment_is_forgotten() -> None:
    group = Group(0.002, 0.04, warn_s=5.0)
    for _ in range(10):
        group.computing_s[1] = 0.04
        assert group.run(3.0) is None
        group.computing_s[1] = 0.002
        assert group.run(3.0) is None


def test_idle_time_does_not_count() -> None:
    group = Group(0.002, 0.04, warn_s=5.0, restart_s=60.0)
    found = group.run(20.0)
    group.run(600.0, idle=True)
    assert not group.slowness.is_too_long(found)
    assert group.run(7.0).rank == 1


@pytest.mark.parametrize("idle_s", [30.0, 1332.0])
@pytest.mark.long
def test_a_slow_second_after_a_long_pause_is_a_slow_second(idle_s: float) -> None:
    """Caches are cold then: the first request must not pay for the pause with the ranks."""
    group = Group(0.002, 0.002)
    for _ in range(50):
        group.computing_s[1] = 0.002
        assert group.run(3.0) is None
        assert group.run(idle_s, idle=True) is None
        group.computing_s[1] = 0.04
        assert group.run(1.0) is None


def test_slow_first_seconds_with_long_pauses_between_them_never_add_up() -> None:
    group = Group(0.002, 0.04)
    for _ in range(100):
        assert group.run(1.0) is None
        group.run(60.0, idle=True)


def test_a_slow_rank_is_named_also_where_there_is_little_to_do() -> None:
    """A third of the time steps run: five seconds of them take fifteen."""
    group = Group(0.002, 0.04, warn_s=5.0, restart_s=60.0)
    found = None
    for _ in range(20):
        found = group.run(1.0) or found
        group.run(2.0, idle=True)
    assert found.rank == 1
    assert found.slow_s == pytest.approx(20.0, rel=0.3)


def test_steps_that_leave_the_ranks_idle_between_them_count_for_as_long_as_they_take() -> None:
    group = Group(0.001, 0.02, warn_s=5.0)
    assert group.run(15.0, step_s=0.025) is None
    assert group.run(30.0, step_s=0.025).rank == 1


def test_a_single_rank_has_no_peers() -> None:
    assert Group(5.0).run(60.0) is None


def test_without_a_bound_it_is_never_too_long() -> None:
    group = Group(0.002, 0.04, warn_s=1.0, restart_s=0.0)
    assert not group.slowness.is_too_long(group.run(600.0))
