"""How even the load is, when that is an alarm, and when affinity gives way to a bound and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose import Affinity, BalanceSettings, ImbalanceThresholds, NodeView, ranked
from ryzanstein.router.choose.recent_load import EVEN, Balance, DecayedCounts, Imbalance, RecentLoad

NODES = [NodeView(name, "m", NodeState.READY, Load(running=2, capacity=8)) for name in ("a", "b", "c", "d")]


def at(ratio: float, chance: float = 0.0, mean: float = 1000.0) -> Imbalance:
    return Imbalance(ratio, chance, mean)


def test_counts_fade_with_the_window_and_stay_in_proportion_for_ever(clock: Any) -> None:
    counts = DecayedCounts(60.0, clock)
    for _ in range(1000):
        counts.add("a", 3.0)
        counts.add("b")
        clock.now += 30.0
        assert counts.value("a") == pytest.approx(3 * counts.value("b"))
    assert counts.value("b") == pytest.approx(60 / 30, rel=0.3)
    clock.now += 60_000
    assert counts.value("a") == pytest.approx(0.0)


def test_the_imbalance_is_that_of_the_fullest_node_for_its_size(clock: Any) -> None:
    recent = RecentLoad(300.0, clock)
    members = [*NODES[:2], NodeView("large", "m", NodeState.READY, Load(capacity=16))]
    for node, count in (("a", 120), ("b", 100), ("large", 180)):
        for _ in range(count):
            recent.placed(node)
    assert recent.imbalance(members).ratio == pytest.approx(0.2)
    assert recent.imbalance(members[:1]) == EVEN
    assert RecentLoad(300.0, clock).imbalance(members) == EVEN


def see(recent: RecentLoad, members: Sequence[NodeView], usable: Sequence[NodeView]) -> None:
    recent.see({node.node_id: node for node in members}, frozenset(node.node_id for node in usable))


def test_a_node_that_comes_back_is_credited_with_what_it_missed(clock: Any) -> None:
    recent = RecentLoad(60.0, clock)
    see(recent, NODES, NODES)
    for _ in range(4000):
        clock.now += 0.1
        see(recent, NODES, NODES)
        for node in NODES:
            recent.placed(node.node_id)
    for _ in range(1200):
        clock.now += 0.1
        see(recent, NODES, NODES[1:])
        for node in NODES[1:]:
            recent.placed(node.node_id)
    assert recent.values(NODES)[0] < 0.2 * recent.values(NODES)[1]
    see(recent, NODES, NODES)
    assert recent.imbalance(NODES).ratio == pytest.approx(0.0, abs=0.01)
    newcomer = NodeView("e", "m", NodeState.READY, Load(capacity=8))
    see(recent, [*NODES, newcomer], [*NODES, newcomer])
    assert recent.values([newcomer])[0] == pytest.approx(recent.values(NODES)[1], rel=0.01)


def test_a_member_that_is_gone_is_forgotten(clock: Any) -> None:
    recent = RecentLoad(60.0, clock)
    for number in range(1000):
        member = NodeView(f"n{number}", "m", NodeState.READY)
        see(recent, [member, *NODES], [member, *NODES])
        recent.placed(member.node_id)
    assert len(recent._counts) <= 1 + len(NODES)


def test_what_chance_explains_is_no_alarm_and_few_requests_are_not_judged(clock: Any) -> None:
    balance = Balance(ImbalanceThresholds(), clock)
    balance.judge(at(0.24, chance=0.235, mean=50), at(0.24, chance=0.235, mean=50))
    assert not balance.alarm
    balance.judge(at(3.0, chance=0.5, mean=8), at(3.0, chance=0.5, mean=8))
    assert not balance.alarm
    assert not balance.skewed


def test_alarm_at_10_percent_and_switch_at_15_and_both_end_below_5(clock: Any) -> None:
    balance = Balance(ImbalanceThresholds(calm_s=300.0), clock)
    seen = []
    for ratio in (0.09, 0.10, 0.14, 0.15, 0.07, 0.04):
        balance.judge(at(ratio), at(ratio))
        seen.append((balance.alarm, balance.skewed))
    assert seen == [(False, False), (True, False), (True, False), (True, True), (True, True), (False, True)]
    clock.now += 299
    balance.judge(at(0.04), at(0.04))
    assert balance.skewed
    clock.now += 2
    balance.judge(at(0.04), at(0.04))
    assert not balance.skewed


def test_a_moment_above_calm_starts_the_calm_time_again(clock: Any) -> None:
    balance = Balance(ImbalanceThresholds(calm_s=300.0), clock)
    balance.judge(at(0.2), at(0.2))
    for ratio in (0.01, 0.06, 0.01):
        balance.judge(at(0.0), at(ratio))
        clock.now += 200
    assert balance.skewed


def test_affinity_becomes_bounded_when_skewed_and_stays_so_while_it_would_be_skewed(make_desk: Any) -> None:
    """The bound evens the load out; judged by that it would switch back, and forth again."""
    desk = make_desk("affinity", BalanceSettings(window_s=120.0, thresholds=ImbalanceThresholds(calm_s=60.0)))
    keys = [f"session:{i}".encode() for i in range(1000)]
    skewed = [key for key in keys if ranked(key, ["a", "b", "c", "d"])[0] == "a"][:60]
    even = [key for key in keys if key not in skewed][:90]
    homes: dict[bytes, str] = {}
    for _ in range(200):
        for key in skewed + even:
            desk.clock.now += 0.02
            homes[key] = desk.chooser.candidates(NODES, "m", Affinity(key, True, home=homes.get(key, "")))[0]
    assert desk.observed.switches == ["bounded"]
    assert desk.observed.alarms[-2:] == [True, False]
    assert desk.observed.last.ratio < 0.06
    for _ in range(200):
        for key in keys[:400]:
            desk.clock.now += 0.02
            desk.chooser.candidates(NODES, "m", Affinity(key, True))
    assert desk.observed.switches == ["bounded", "affinity"]


def test_other_policies_are_never_switched(make_desk: Any) -> None:
    desk = make_desk("weighted")
    for _ in range(4000):
        desk.clock.now += 0.02
        desk.chooser.candidates(NODES, "m", Affinity(b"session:1", True))
    assert desk.observed.last.ratio > 0.15
    assert desk.observed.alarms[-1]
    assert desk.observed.switches == []
