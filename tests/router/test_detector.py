"""Suspicion from silence, and from work that does not move."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.router.detector import BeatDetector, Intervals, Progress, Thresholds

THRESHOLDS = Thresholds()


def beating(interval_s: float, working: bool, beats: int = 50, jitter_s: float = 0.0) -> tuple[BeatDetector, float]:
    """A detector after some beats, and the time of the last one."""
    detector = BeatDetector(THRESHOLDS, 0.0)
    rng = random.Random(1)
    now = 0.0
    for _ in range(beats):
        now += max(0.001, rng.gauss(interval_s, jitter_s))
        detector.beat(now, working)
    return detector, now


@given(st.lists(st.floats(0.001, 1.0), max_size=300), st.floats(0.1, 12.0))
def test_silence_is_the_inverse_of_phi(intervals: list[float], phi: float) -> None:
    rate = Intervals(0.05, 0.05)
    for interval_s in intervals:
        rate.add(interval_s)
    assert rate.phi(rate.silence_s(phi)) == pytest.approx(phi, rel=0.01)


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=20))
def test_suspicion_only_grows_with_silence(silences: list[float]) -> None:
    detector, now = beating(0.05, True)
    phis = [detector.phi(now + silence) for silence in sorted(silences)]
    assert phis == sorted(phis)


def test_a_working_node_that_falls_silent_is_suspected_and_dead_within_a_second() -> None:
    detector, now = beating(0.05, True)
    assert 0.1 < detector.suspect_at - now < 0.3
    assert detector.suspect_at < detector.dead_at < now + 1.0


def test_an_idle_node_is_given_its_slower_rate() -> None:
    detector, now = beating(0.5, False)
    assert 0.6 < detector.suspect_at - now < 1.0


def test_a_node_that_starts_to_work_is_judged_by_the_faster_rate_from_its_first_working_beat() -> None:
    detector, now = beating(0.5, False)
    detector.beat(now + 0.5, True)
    assert detector.suspect_at - (now + 0.5) < 0.3


def test_intervals_over_a_change_of_rate_are_not_counted() -> None:
    detector, now = beating(0.05, True)
    usual = detector.suspect_at - now
    detector.beat(now + 0.5, False)
    detector.beat(now + 1.0, True)
    assert detector.suspect_at - (now + 1.0) == pytest.approx(usual)


def test_tokens_keep_suspicion_away_though_beats_are_missing() -> None:
    detector, now = beating(0.05, True)
    detector.sign(now + 0.15)
    assert detector.suspect_at > now + 0.3


def test_an_unpunctual_node_is_given_more_time() -> None:
    punctual, at = beating(0.05, True)
    unpunctual, at_unpunctual = beating(0.15, True, beats=200, jitter_s=0.08)
    assert unpunctual.suspect_at - at_unpunctual > 1.5 * (punctual.suspect_at - at)


def test_false_alarms_are_rare_on_a_node_with_the_jitter_of_a_busy_machine() -> None:
    detector = BeatDetector(THRESHOLDS, 0.0)
    rng = random.Random(2)
    now, alarms = 0.0, 0
    for _ in range(20_000):
        due = now + 0.05 + rng.expovariate(1 / 0.015)
        alarms += due > detector.suspect_at
        now = due
        detector.beat(now, True)
    assert alarms / 20_000 < 0.01


def test_one_long_freeze_does_not_make_the_next_one_look_usual() -> None:
    detector, now = beating(0.05, True, beats=120)
    detector.beat(now + 60.0, True)
    assert detector.dead_at - (now + 60.0) < 1.2


def test_phi_of_an_impossible_silence_is_infinite() -> None:
    assert Intervals(0.05, 0.05).phi(100.0) == math.inf


def test_pending_work_that_does_not_move_is_a_stall_and_idleness_is_not() -> None:
    progress = Progress(THRESHOLDS)
    assert progress.stalled_at == math.inf
    progress.beat(10.0, 7, pending=False)
    assert progress.stalled_at == math.inf
    progress.beat(11.0, 7, pending=True)
    assert progress.stalled_at == 13.0
    progress.beat(12.0, 7, pending=True)
    assert progress.stalled_at == 13.0
    progress.beat(12.5, 8, pending=True)
    assert progress.stalled_at > 14.4
    progress.beat(12.6, 8, pending=False)
    assert progress.stalled_at == math.inf


def test_slow_steps_are_given_a_multiple_of_their_usual_time() -> None:
    progress = Progress(THRESHOLDS)
    for step in range(60):
        progress.beat(float(step), step, pending=True)
    assert progress.stalled_at - 59.0 == pytest.approx(10.0, rel=0.01)


def test_a_node_that_starts_to_count_anew_has_moved() -> None:
    progress = Progress(THRESHOLDS)
    progress.beat(1.0, 500, pending=True)
    progress.beat(2.0, 3, pending=True)
    assert progress.stalled_at == 4.0
