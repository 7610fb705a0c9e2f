"""When an attempt that brings nothing is forgotten, and when it waits its turn."""

from __future__ import annotations

import pytest

from ryzanstein.cluster import Load
from ryzanstein.router.patience import Patience, Quiet

PATIENCE = Patience(accept_s=5.0, silence_s=20.0)
IDLE, QUEUE = Load(running=3, waiting=0, capacity=64), Load(running=64, waiting=128, capacity=64)


@pytest.mark.parametrize(
    ("quiet", "bound_s"),
    [
        (Quiet(100.0, None, False, False, IDLE), 5.0),
        (Quiet(100.0, None, False, False, QUEUE), 5.0),
        (Quiet(100.0, 10, False, False, IDLE), 20.5),
        (Quiet(100.0, 4000, False, False, IDLE), 220.0),
        (Quiet(100.0, 4000, True, False, IDLE), 20.0),
        (Quiet(100.0, 10, False, True, QUEUE), 60.5),
        (Quiet(100.0, 10, True, True, QUEUE), 60.0),
    ],
)
def test_it_is_forgotten_exactly_when_the_bound_has_passed(quiet: Quiet, bound_s: float) -> None:
    assert PATIENCE.left_s(quiet, 100.0) == pytest.approx(bound_s)
    assert PATIENCE.left_s(quiet, 100.0 + bound_s - 0.01) > 0
    assert PATIENCE.left_s(quiet, 100.0 + bound_s) <= 0


@pytest.mark.parametrize("begun", [False, True])
def test_in_a_queue_nobody_is_forgotten_before_someone_later_has_begun(begun: bool) -> None:
    assert PATIENCE.left_s(Quiet(100.0, 10, begun, False, QUEUE), 100_000.0) == PATIENCE.accept_s
    assert PATIENCE.left_s(Quiet(100.0, 10, begun, True, QUEUE), 100_000.0) < 0


def test_a_node_of_unknown_capacity_has_a_bound_too() -> None:
    assert PATIENCE.bound_s(Quiet(0.0, 0, True, True, Load())) == 20.0
