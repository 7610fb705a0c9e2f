"""Suspicion from silence, and from work that does not move."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.router.nodes.links.phi_detector import (
    MAX_UNANSWERED,
    QUIET_INTERVAL_S,
    BeatDetector,
    BeatIntervals,
    BeatRate,
    Echoes,
    Intervals,
    PhiThresholds,
    Progress,
)

THRESHOLDS = PhiThresholds()
WORKING, IDLE, QUIET = BeatRate.WORKING, BeatRate.IDLE, BeatRate.QUIET


def beating(interval_s: float, working: bool, beats: int = 50, jitter_s: float = 0.0) -> tuple[BeatDetector, float]:
    """A detector after some beats, and the time of the last one."""
    detector = BeatDetector(THRESHOLDS, 0.0)
    rng = random.Random(1)
    now = 0.0
    for _ in range(beats):
        now += max(0.001, rng.gauss(interval_s, jitter_s))
        detector.beat(now, WORKING if working else IDLE)
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
    detector.beat(now + 0.5, WORKING)
    assert detector.suspect_at - (now + 0.5) < 0.3


def test_a_quiet_stream_is_given_its_interval_whatever_came_between() -> None:
    detector, now = beating(0.5, False)
    for _ in range(200):
        now += 0.01
        detector.beat(now, QUIET)
    assert QUIET_INTERVAL_S < detector.suspect_at - now < 2 * QUIET_INTERVAL_S


def test_work_on_a_quiet_stream_is_judged_from_when_it_was_given() -> None:
    detector, now = beating(0.5, False)
    usual = detector.suspect_at - now
    detector.beat(now, QUIET)
    detector.expect(now + 1.9)
    assert detector.suspect_at - (now + 1.9) == pytest.approx(usual), "as on a stream that was never quiet"
    detector.beat(now + 1.95, WORKING)
    detector.beat(now + 2.0, WORKING)
    assert detector.suspect_at - (now + 2.0) < 0.3


def test_work_that_moves_unseen_on_a_quiet_stream_is_no_stall() -> None:
    progress = Progress(THRESHOLDS)
    for second in range(0, 20, 2):
        progress.beat(float(second), 100 * second, True, unseen_s=QUIET_INTERVAL_S)
        assert progress.stalled_at > second + QUIET_INTERVAL_S + 1
    progress.expect(19.9)
    assert progress.stalled_at >= 19.9 + THRESHOLDS.stall_s


def test_intervals_over_a_change_of_rate_are_not_counted() -> None:
    detector, now = beating(0.05, True)
    usual = detector.suspect_at - now
    detector.beat(now + 0.5, IDLE)
    detector.beat(now + 1.0, WORKING)
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
        detector.beat(now, WORKING)
    assert alarms / 20_000 < 0.01


def test_one_long_freeze_does_not_make_the_next_one_look_usual() -> None:
    detector, now = beating(0.05, True, beats=120)
    detector.beat(now + 60.0, WORKING)
    assert detector.dead_at - (now + 60.0) < 1.2


def test_phi_of_an_impossible_silence_is_infinite() -> None:
    assert Intervals(0.05, 0.05).phi(100.0) == math.inf


def test_a_profiler_that_begins_or_writes_is_no_stall() -> None:
    progress = Progress(THRESHOLDS)
    for i in range(10):
        progress.beat(i, i, True)
    usual_s = progress.stalled_at - 9
    for i in range(10, 40):
        progress.beat(i, 9, True, profiling=True)
        assert progress.stalled_at > i + 1
    progress.beat(40, 10, True)
    assert progress.stalled_at - 40 == pytest.approx(usual_s, rel=0.1)


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


def answering(round_trip_s: float, interval_s: float = 0.25, beats: int = 200) -> tuple[Echoes, float]:
    """Echoes of a way of this length, and the time of the next beat, which is not asked yet."""
    echoes = Echoes(THRESHOLDS)
    beat_at = [number * interval_s for number in range(beats)]
    events = [(at, 0, number) for number, at in enumerate(beat_at, 1)]
    events += [
        (at + round_trip_s, 1, number) for number, at in enumerate(beat_at, 1) if at + round_trip_s <= beats * interval_s
    ]
    for at, answer, number in sorted(events):
        (echoes.answered if answer else echoes.asked)(at, number)
    return echoes, beats * interval_s


def test_a_node_that_stops_to_answer_is_deaf_within_half_a_second_of_a_beat_and_given_up_later() -> None:
    echoes, now = answering(0.001)
    assert echoes.suspect_at == math.inf, "nothing is asked"
    echoes.asked(now, 201)
    assert 0.3 < echoes.suspect_at - now < 0.5
    assert now + 1.2 < echoes.dead_at < now + 2.0


def test_a_deaf_node_is_given_up_no_earlier_than_a_silent_one() -> None:
    detector, last_beat = beating(0.5, False)
    echoes, now = answering(0.0005)
    echoes.asked(now, 201)
    assert echoes.dead_at - now > beating(0.05, True)[0].dead_at - beating(0.05, True)[1]
    assert echoes.dead_at - now > 0.9 * (detector.dead_at - last_beat)


def test_more_beats_without_an_answer_do_not_put_suspicion_off() -> None:
    echoes, now = answering(0.001)
    echoes.asked(now, 201)
    suspect_at, dead_at = echoes.suspect_at, echoes.dead_at
    for number in range(1, 10 * MAX_UNANSWERED):
        echoes.asked(now + 0.25 * number, 201 + number)
    assert (echoes.suspect_at, echoes.dead_at) == (suspect_at, dead_at)


def test_a_stream_that_never_had_an_answer_is_not_judged() -> None:
    echoes = Echoes(THRESHOLDS)
    for number in range(1, 1000):
        echoes.asked(0.25 * number, number)
    assert (echoes.suspect_at, echoes.dead_at) == (math.inf, math.inf)
    echoes.answered(250.0, 999)
    echoes.asked(251.0, 1000)
    assert 251.0 < echoes.suspect_at < echoes.dead_at < math.inf


def test_one_answer_covers_all_earlier_beats_and_none_that_was_not_sent() -> None:
    echoes, now = answering(0.001)
    for number in (201, 202, 203):
        echoes.asked(now + 0.1 * number, number)
    echoes.answered(now + 30.0, 204)
    assert echoes.suspect_at < now + 30.0, "204 was never sent"
    echoes.answered(now + 30.0, 203)
    assert echoes.suspect_at == math.inf


@pytest.mark.parametrize("interval_s", [0.25, 1.0])
def test_a_way_of_a_second_is_learnt(interval_s: float) -> None:
    echoes, now = answering(1.0, interval_s)
    for number in range(201, 201 + round(1.0 / interval_s)):
        echoes.asked(now, number)
        assert echoes.suspect_at > now + 0.1
        now += interval_s
        echoes.answered(now, number + 1 - round(1.0 / interval_s))


@pytest.mark.parametrize(("interval_s", "most"), [(0.25, 1), (1.0, 2)])
def test_a_way_that_becomes_longer_is_suspected_at_first_and_not_given_up(interval_s: float, most: int) -> None:
    echoes, now = answering(0.001, interval_s)
    events = [(now + interval_s * number, 0, 201 + number) for number in range(60)]
    events += [(at + 1.0, 1, number) for at, _, number in events]
    alarms, suspected = 0, False
    for at, answer, number in sorted(events):
        assert at < echoes.dead_at
        alarms += at >= echoes.suspect_at and not suspected
        suspected = at >= echoes.suspect_at and not answer
        (echoes.answered if answer else echoes.asked)(at, number)
    assert 1 <= alarms <= most


def test_one_deaf_while_does_not_make_the_next_one_look_usual() -> None:
    echoes, now = answering(0.001)
    for number in range(40):
        echoes.asked(now + 0.25 * number, 201 + number)
    for number in range(40):
        echoes.answered(now + 10.0 + 0.001 * number, 201 + number)
    echoes.asked(now + 10.25, 241)
    echoes.answered(now + 10.251, 241)
    echoes.asked(now + 10.5, 242)
    assert echoes.suspect_at - (now + 10.5) < 0.5


def test_answers_are_rarely_missed_on_a_busy_machine() -> None:
    echoes = Echoes(THRESHOLDS)
    rng = random.Random(3)
    alarms, now = 0, 0.0
    for number in range(1, 20_001):
        now += 0.25
        echoes.asked(now, number)
        answer = now + rng.expovariate(1 / 0.03)
        alarms += answer > echoes.suspect_at
        echoes.answered(answer, number)
    assert alarms / 20_000 < 0.001


def test_a_node_that_beats_seldom_as_it_said_is_not_suspect() -> None:
    message = BeatDetector(THRESHOLDS, 0.0, BeatIntervals(working_s=0.05, idle_s=2.0))
    unsaid = BeatDetector(THRESHOLDS, 0.0)
    for detector in (message, unsaid):
        detector.beat(0.0, IDLE)
    assert message.suspect_at > 2.0 > unsaid.dead_at
