"""The ladder alone: what follows a loss, given the losses before it."""

from __future__ import annotations

import math

import pytest

from ryzanstein.worker.supervision.group import LossCause, RankLoss
from ryzanstein.worker.supervision.recovery import Ladder, RecoveryPolicy, Rung


class Node:
    """Ranks that serve for a while and are lost, again and again."""

    def __init__(self, **policy: float) -> None:
        self.now = 1000.0
        self.ladder = Ladder(RecoveryPolicy(**policy), lambda: self.now)

    def lose(self, after_s: float | None, rank: int = 0):
        """`after_s` of service; None: the start failed."""
        if after_s is not None:
            self.ladder.serves()
            self.now += after_s
        recovery = self.ladder.lost(RankLoss(rank, LossCause.DIED, f"rank {rank} died"))
        self.now += 0 if math.isinf(recovery.pause_s) else recovery.pause_s
        return recovery


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer() -> None:
    node = Node(first_s=0.25, longest_s=0.75, crash_limit=99)
    assert [node.lose(1.0).pause_s for _ in range(5)] == [0.0, 0.25, 0.5, 0.75, 0.75]


def test_ranks_that_lived_long_enough_begin_anew() -> None:
    node = Node()
    node.lose(1.0)
    assert node.lose(1.0).pause_s > 0
    assert node.lose(11.0).pause_s == 0


@pytest.mark.parametrize("served_s", [None, 1.0])
def test_crashes_in_a_row_lead_to_quarantine(served_s) -> None:
    node = Node(crash_limit=3)
    recoveries = [node.lose(served_s) for _ in range(3)]
    assert [recovery.rung for recovery in recoveries] == [Rung.RESTART_RANKS, Rung.RESTART_RANKS, Rung.QUARANTINE]
    assert "3 crashes in a row" in recoveries[-1].reason
    assert "rank 0 died" in recoveries[-1].reason


def test_losses_far_apart_lead_to_quarantine_when_they_are_many_within_the_window() -> None:
    node = Node(loss_limit=4, window_s=600.0)
    recoveries = [node.lose(60.0, rank) for rank in (1, 0, 1, 1)]
    assert [recovery.rung for recovery in recoveries] == [Rung.RESTART_RANKS] * 3 + [Rung.QUARANTINE]
    assert "4 losses within 600 s, 3 of them of rank 1" in recoveries[-1].reason


def test_losses_beyond_the_window_are_forgotten() -> None:
    node = Node(loss_limit=4, window_s=600.0)
    assert {node.lose(301.0).rung for _ in range(20)} == {Rung.RESTART_RANKS}


def test_a_quarantine_that_did_not_help_is_doubled_and_in_the_end_the_node_drains() -> None:
    node = Node(crash_limit=1, quarantine_s=30.0, longest_quarantine_s=100.0, quarantine_limit=3)
    recoveries = [node.lose(None) for _ in range(4)]
    assert [recovery.pause_s for recovery in recoveries] == [30.0, 60.0, 100.0, math.inf]
    assert recoveries[-1].rung is Rung.DRAIN
    assert "drained after 3 quarantines" in recoveries[-1].reason


def test_one_crash_right_after_a_quarantine_leads_back() -> None:
    node = Node(crash_limit=3)
    for _ in range(3):
        node.lose(None)
    assert node.lose(2.0).rung is Rung.QUARANTINE


def test_after_a_quarantine_that_helped_a_loss_is_a_loss_like_any_other() -> None:
    node = Node(crash_limit=3, quarantine_s=30.0)
    for _ in range(3):
        node.lose(None)
    assert node.lose(601.0).rung is Rung.RESTART_RANKS
    node.lose(1.0)
    assert node.lose(1.0).pause_s == 30.0, "the next quarantine is a first one"


def test_an_operator_clears_the_record() -> None:
    node = Node(crash_limit=1, quarantine_limit=1)
    node.lose(None)
    assert node.lose(None).rung is Rung.DRAIN
    node.ladder.reset()
    assert node.lose(None).rung is Rung.QUARANTINE
