"""The beats of quiet links come at few moments, and as many at each."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ryzanstein.router.nodes.links.connection import MOMENT_S, next_moment
from ryzanstein.router.nodes.links.phi_detector import QUIET_INTERVAL_S


def test_many_links_share_few_moments_evenly() -> None:
    began = 1234.567
    beats = [next_moment(began + random.random() * 3, QUIET_INTERVAL_S, place) for place in range(1000)]
    moments = Counter(round(beat % QUIET_INTERVAL_S, 6) for beat in beats)
    assert len(moments) == QUIET_INTERVAL_S / MOMENT_S
    assert max(moments.values()) - min(moments.values()) <= 1


@pytest.mark.parametrize("late_s", [-0.001, 0.0, 0.0005, 0.03, MOMENT_S / 2 - 0.001])
def test_a_timer_that_is_early_or_late_does_not_move_the_next_beat(late_s: float) -> None:
    beat = next_moment(77.0, QUIET_INTERVAL_S, 5)
    assert next_moment(beat + late_s, QUIET_INTERVAL_S, 5) == pytest.approx(beat + QUIET_INTERVAL_S)


def test_the_first_wait_is_at_most_half_a_moment_longer_than_the_interval() -> None:
    for place in range(40):
        waits = [next_moment(last / 100, QUIET_INTERVAL_S, place) - last / 100 for last in range(400)]
        assert min(waits) >= MOMENT_S / 2
        assert max(waits) <= QUIET_INTERVAL_S + MOMENT_S / 2
