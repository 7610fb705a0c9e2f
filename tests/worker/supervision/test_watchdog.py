from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.supervision.group import STANDSTILLS, RankProgress
from ryzanstein.worker.supervision.watchdog import StallBounds, Watchdog

INTERVAL_S = 0.1
BOUNDS = StallBounds(min_s=2.0, factor=10.0, profile_s=60.0)


def progress(
    rank: int, step: int, collective: int, phase: str = "forward", *, moved_s: float = 0.0, tokens: int = 1
) -> RankProgress:
    return RankProgress(rank, 100 + rank, step, collective, phase, moved_s, 1.0, tokens, 0.001)


def idle(rank: int, step: int, collective: int = 0) -> RankProgress:
    return replace(progress(rank, step, collective, "idle"), begun_s=0.0)


def watch(watchdog: Watchdog, ranks, seconds: float, *, pending: bool = True, stopped=tuple, start: float = 0.0):
    """The first stall and when it was seen."""
    for tick in range(round(seconds / INTERVAL_S) + 1):
        stall = watchdog.observe(start + tick * INTERVAL_S, ranks, pending=pending, stopped=stopped)
        if stall is not None:
            return stall, tick * INTERVAL_S
    return None, seconds


@pytest.fixture
def watchdog():
    return Watchdog(BOUNDS, INTERVAL_S)


def test_work_that_does_not_move_for_the_least_bound_is_a_stall(watchdog):
    stall, at = watch(watchdog, [progress(0, 5, 40)], 5)
    assert stall is not None
    assert 2.0 <= at <= 2.3


def test_idle_ranks_are_no_stall_however_long(watchdog):
    assert watch(watchdog, [idle(0, 5), idle(1, 5)], 100, pending=False) == (None, 100)


def test_idle_ranks_for_which_work_waits_are_a_stall(watchdog):
    stall, _ = watch(watchdog, [idle(0, 5), idle(1, 5)], 5, pending=True)
    assert stall is not None


def test_moving_work_is_no_stall(watchdog):
    for tick in range(100):
        assert watchdog.observe(tick * 1.0, [progress(0, tick, 0)], pending=True) is None


def test_slow_steps_widen_the_bound(watchdog):
    for _ in range(50):
        watchdog.record(0.8, 1)
    stall, at = watch(watchdog, [progress(0, 1, 1)], 20)
    assert stall is not None
    assert 8.0 <= at <= 8.3


def test_a_step_with_many_tokens_may_take_longer(watchdog):
    for _ in range(50):
        watchdog.record(0.005, 1)
    assert watch(watchdog, [progress(0, 1, 1, tokens=100)], 4.9)[0] is None
    assert watch(watchdog, [progress(0, 1, 2, tokens=1)], 4.9, start=10)[0] is not None


def test_slow_decode_steps_do_not_hide_a_hang_in_a_prompt(watchdog):
    """Found by seed 2255371586: a rank hung in a prompt of 103 tokens for 315 s, while its node seemed healthy."""
    watchdog.record(0.1, 512)
    for _ in range(50):
        watchdog.record(0.4, 1)
    stall, at = watch(watchdog, [progress(0, 1, 1, tokens=103)], 100)
    assert stall is not None
    assert 4.0 <= at <= 4.3


def test_a_prompt_may_take_as_much_longer_as_decode_steps_do(watchdog):
    watchdog.record(1.0, 512)
    for step_s in [0.01] * 50 + [0.2] * 50:
        watchdog.record(step_s, 1)
    assert watch(watchdog, [progress(0, 1, 1, tokens=512)], 199)[0] is None
    assert watch(watchdog, [progress(0, 1, 2, tokens=1)], 5, start=200)[0] is not None


def test_a_prompt_is_measured_by_the_next_larger_step(watchdog):
    watchdog.record(3.0, 2048)
    watchdog.record(0.5, 300)
    assert watchdog.bound_s([progress(0, 1, 1, tokens=256)]) == pytest.approx(5.0)
    assert watchdog.bound_s([progress(0, 1, 1, tokens=1000)]) == pytest.approx(30.0)
    assert watchdog.bound_s([progress(0, 1, 1, tokens=4096)]) == pytest.approx(60.0)


@pytest.mark.parametrize("phase", sorted(STANDSTILLS))
def test_a_known_standstill_is_no_stall(watchdog, phase):
    assert watch(watchdog, [progress(0, 1, 1, "all_reduce"), progress(1, 1, 0, phase)], 50)[0] is None


def test_the_rank_with_the_fewest_collectives_is_blamed_and_the_waiting_one_named(watchdog):
    ranks = [progress(0, 7, 42, "all_reduce"), progress(1, 7, 41), progress(2, 7, 42, "all_reduce")]
    stall, _ = watch(watchdog, ranks, 5)
    assert (stall.rank, stall.waiting) == (1, (0, 2))
    assert "rank 0, 2 waits in all_reduce (collective 42)" in str(stall)


def test_a_rank_that_is_a_step_behind_is_blamed_whatever_its_collectives(watchdog):
    stall, _ = watch(watchdog, [progress(0, 8, 50), progress(1, 7, 60)], 5)
    assert stall.rank == 1


def test_among_equals_a_stopped_process_is_blamed(watchdog):
    ranks = [progress(0, 7, 42, moved_s=1.0), progress(1, 7, 42, moved_s=2.0)]
    stall, _ = watch(watchdog, ranks, 5, stopped=lambda: {1})
    assert stall.rank == 1


def test_processes_are_looked_at_only_when_there_is_a_stall(watchdog):
    def looked():
        raise AssertionError

    assert watch(watchdog, [progress(0, 7, 42)], 1.5, stopped=looked)[0] is None


def test_the_tokens_of_the_last_step_do_not_widen_the_bound_of_idle_ranks(watchdog):
    for _ in range(50):
        watchdog.record(0.05, 1)
    ranks = [replace(idle(0, 5), answered=1), replace(idle(1, 5), num_tokens=169)]
    stall, at = watch(watchdog, ranks, 100)
    assert stall is not None
    assert 2.0 <= at <= 2.3


@given(gap_s=st.floats(0.0, 3600.0))
def test_time_in_which_the_agent_did_not_run_is_not_held_against_the_ranks(gap_s):
    watchdog = Watchdog(BOUNDS, INTERVAL_S)
    ranks = [progress(0, 5, 40)]
    watchdog.observe(0.0, ranks, pending=True)
    watchdog.observe(0.1, ranks, pending=True)
    assert watchdog.observe(0.1 + gap_s, ranks, pending=True) is None
