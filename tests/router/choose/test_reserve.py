"""Reserve nodes: they come behind all others, and change nothing about these."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose import (
    Affinity,
    BalanceSettings,
    ChoiceOutcome,
    Chooser,
    Members,
    NodeView,
    PolicyBounds,
    PolicyChoice,
    PolicyName,
)

POLICIES: list[PolicyName] = list(get_args(PolicyName))
NAMES = st.text("abcdef0123456789-", min_size=1, max_size=8)
CAPACITY = 8


class Silent:
    """Observes nothing."""

    def chosen(self, *what: object) -> None: ...
    def judged(self, *what: object) -> None: ...
    def switched(self, *what: object) -> None: ...


def node(node_id: str, *, reserve: bool = False, running: int = 0, waiting: int = 0, **state: Any) -> NodeView:
    load = Load(running=running, waiting=waiting, capacity=CAPACITY)
    return NodeView(node_id, "m", NodeState.READY, load, reserve=reserve, **state)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeView]:
    """One to eight nodes in any state and with any load, at least one of them a reserve."""
    states = st.builds(
        node,
        NAMES,
        reserve=st.booleans(),
        running=st.integers(0, CAPACITY),
        waiting=st.sampled_from([0, 0, 1, 33, 1000]),
        admits=st.booleans(),
        suspected=st.booleans(),
        linked=st.booleans(),
    )
    members = draw(st.lists(states, min_size=1, max_size=8, unique_by=lambda each: each.node_id))
    return [replace(members[0], reserve=True), *members[1:]]


KEYS = st.builds(Affinity, st.binary(min_size=1, max_size=16), st.booleans(), home=NAMES | st.just(""))


def new_chooser(policy: PolicyName) -> Chooser:
    return Chooser(PolicyChoice(policy, bounds=PolicyBounds()), BalanceSettings(), Silent(), lambda: 1.0)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(policy=st.sampled_from(POLICIES), members=clusters(), keys=st.lists(KEYS, min_size=1, max_size=12))
def test_the_reserve_comes_last_and_the_others_are_ranked_as_without_it(
    policy: PolicyName, members: list[NodeView], keys: list[Affinity]
) -> None:
    regular = [each for each in members if not each.reserve]
    mixed, alone = new_chooser(policy), new_chooser(policy)
    for key in keys:
        ranking = mixed.rank(Members.of(members), "m", key)
        first = [node_id for node_id in ranking.node_ids if node_id in {each.node_id for each in regular}]
        if regular:
            assert first == list(alone.rank(Members.of(regular), "m", key).node_ids)
            assert list(ranking.node_ids[: len(first)]) == first
        if ranking.node_ids:
            mixed.place(ranking, ranking.node_ids[0])
        if first:
            alone.place(alone.rank(Members.of(regular), "m", key), first[0])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(policy=st.sampled_from(POLICIES), members=clusters(), key=KEYS)
def test_the_reserve_is_there_when_no_other_is(policy: PolicyName, members: list[NodeView], key: Affinity) -> None:
    usable = {each.node_id for each in members if each.linked and each.admits and not each.suspected}
    regular = usable & {each.node_id for each in members if not each.reserve}
    chooser = new_chooser(policy)
    ranking = chooser.rank(Members.of(members), "m", key, regular)
    assert set(ranking.node_ids) == usable - regular
    for chosen in ranking.node_ids:
        chooser.place(ranking, chosen)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_returns_from_the_reserve_with_its_next_turn(make_desk: Any, policy: PolicyName) -> None:
    desk = make_desk(policy)
    regular, reserve = node("gpu"), node("cpu", reserve=True)
    asked = Affinity(b"session:s", True, (b"m" * 16,))
    assert desk.chooser.candidates([regular, reserve], "m", asked)[0] == "gpu"
    assert desk.chooser.candidates([replace(regular, linked=False), reserve], "m", asked) == ["cpu"]
    assert desk.observed.outcomes[ChoiceOutcome.RESERVE] == 1
    for _ in range(50):
        assert desk.chooser.candidates([regular, reserve], "m", replace(asked, home="cpu"))[0] == "gpu"


@pytest.mark.parametrize("policy", POLICIES)
def test_load_is_never_uneven_because_the_reserve_has_none(make_desk: Any, policy: PolicyName) -> None:
    desk = make_desk(policy, settings=BalanceSettings(window_s=900))
    members = [node("gpu"), node("cpu", reserve=True)]
    for number in range(500):
        desk.clock.now += 1.1
        desk.chooser.candidates(members, "m", Affinity(b"session:%d" % number, True))
    assert desk.observed.alarms in ([], [False])
    assert desk.observed.switches == []
    assert desk.observed.outcomes.keys() <= {ChoiceOutcome.PRIMARY, ChoiceOutcome.BALANCED}


def test_where_all_nodes_are_a_reserve_they_share_the_load(make_desk: Any) -> None:
    chooser = make_desk("affinity").chooser
    members = [node(name, reserve=True) for name in "abcd"]
    counts = Counter(chooser.candidates(members, "m", Affinity(b"session:%d" % number, True))[0] for number in range(400))
    assert len(counts) == 4
    assert max(counts.values()) < 140
