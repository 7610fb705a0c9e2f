"""The choice from what events keep equals a filter and a full sort of all nodes, whatever happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.router.choose.sorting import KEYED, SortingChooser

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose import (
    Affinity,
    BalanceSettings,
    Chooser,
    ImbalanceThresholds,
    LazyOrder,
    Members,
    NodeView,
    OrderMemory,
    PolicyBounds,
    PolicyChoice,
    PolicyName,
    ranked,
)
from ryzanstein.router.choose.members import RecentOrders

POLICIES: list[PolicyName] = list(get_args(PolicyName))
NAMES = [f"n{number}" for number in range(12)]
BOUNDS = PolicyBounds(queue_bound=2, bound_floor=1, prefix_entries=6)
WINDOW_S = 60.0
NEVER = ImbalanceThresholds(switch=10.0)


def usually(value: Any, others: Any) -> Any:
    return st.integers(0, 5).flatmap(lambda number: others if number == 5 else st.just(value))


VIEWS = st.builds(
    NodeView,
    st.sampled_from(NAMES),
    usually("m", st.sampled_from(["other", ""])),
    usually(NodeState.READY, st.sampled_from(list(NodeState))),
    st.builds(Load, st.integers(0, 8), st.sampled_from([0, 0, 1, 3, 33]), usually(8, st.sampled_from([0, 4, 16]))),
    st.integers(0, 12),
    admits=usually(True, st.booleans()),
    suspected=usually(False, st.booleans()),
    drain_requested=usually(False, st.booleans()),
    linked=usually(True, st.booleans()),
    reserve=usually(False, st.booleans()),
)
AFFINITIES = st.builds(
    Affinity,
    st.sampled_from([b"session:%d" % number for number in range(6)]),
    st.booleans(),
    st.sampled_from([(), (b"1",), (b"1", b"2"), (b"3", b"4", b"5")]),
    st.sampled_from(["", *NAMES]),
)
ASKED = st.tuples(AFFINITIES, st.frozensets(st.sampled_from(NAMES), max_size=3) | st.just(frozenset()), st.integers(0, 2))
PASSED = st.floats(0.0, 40.0)
EVENTS = st.lists(VIEWS | ASKED | ASKED | PASSED | st.sampled_from(NAMES), min_size=30, max_size=60)
START = [NodeView(name, "m", NodeState.READY, Load(capacity=8)) for name in NAMES]


@dataclass
class Told:
    """What an observer was told."""

    outcomes: list[str] = field(default_factory=list)

    def chosen(self, model: str, policy: PolicyName, outcome: Any) -> None:
        self.outcomes.append(outcome)

    def judged(self, *what: object) -> None: ...
    def switched(self, *what: object) -> None: ...


class Both:
    """A chooser, and the sort that it must equal."""

    def __init__(self, policy: PolicyName) -> None:
        self.now = 100.0
        self.told = Told()
        self.views: dict[str, NodeView] = {}
        self.members = Members()
        choice = PolicyChoice(policy, bounds=BOUNDS)
        self.chooser = Chooser(choice, BalanceSettings(WINDOW_S, NEVER), self.told, lambda: self.now)
        self.sorting = SortingChooser(policy, BOUNDS, WINDOW_S, lambda: self.now)

    def happen(self, event: Any) -> None:
        match event:
            case NodeView():
                self._put(event)
            case str():
                self.views.pop(event, None)
                self.members.remove(event)
            case float():
                self.now += event
            case (affinity, excluded, number):
                self._ask(affinity, excluded, number)

    def _put(self, view: NodeView) -> None:
        self.views[view.node_id] = view
        if view.model == "m":
            self.members.put(view)
        else:
            self.members.remove(view.node_id)

    def _ask(self, affinity: Affinity, excluded: frozenset[str], number: int) -> None:
        ranking = self.chooser.rank(self.members, "m", affinity, excluded)
        sort = self.sorting.rank(list(self.views.values()), "m", affinity, excluded)
        assert list(ranking.node_ids) == sort.node_ids
        assert ranking.able == sort.able
        if self.sorting.policy in KEYED:
            assert ranking.primary == next(iter(sort.ranked), "")
            assert ranking.wanted == next((node_id for node_id in sort.ranked if node_id in sort.able), "")
        if number < len(sort.node_ids):
            self.chooser.place(ranking, sort.node_ids[number])
            assert self.told.outcomes[-1] == self.sorting.place(sort, sort.node_ids[number])
        self._compare_loads()

    def _compare_loads(self) -> None:
        routing = self.chooser._routing("m")
        for ours, theirs in ((routing._placed, self.sorting.placed), (routing._wanted, self.sorting.wanted)):
            for node_id in NAMES:
                assert ours.value(node_id) == pytest.approx(theirs.value(node_id))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=100)
@given(policy=st.sampled_from(POLICIES), events=EVENTS)
def test_the_choice_equals_a_full_sort_after_any_events(policy: PolicyName, events: list[Any]) -> None:
    both = Both(policy)
    for event in [*START, *events]:
        both.happen(event)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_two_are_decided_when_they_are_ranked(policy: PolicyName) -> None:
    """The backup is read after the placement has changed loads, turns and beginnings."""
    both = Both(policy)
    for view in START:
        both.happen(view)
    affinity = Affinity(b"session:s", True, (b"1",))
    for number in range(200):
        ranking = both.chooser.rank(both.members, "m", affinity)
        sort = both.sorting.rank(list(both.views.values()), "m", affinity, ())
        both.chooser.place(ranking, ranking.node_ids[0])
        both.sorting.place(sort, sort.node_ids[0])
        both.happen(NodeView(NAMES[number % 12], "m", NodeState.READY, Load(number % 5, number % 7, 8)))
        assert list(ranking.node_ids[:2]) == sort.node_ids[:2]


def test_a_load_makes_no_new_order_and_another_member_does() -> None:
    memory = OrderMemory()
    members = Members(memory)
    for name in NAMES:
        members.put(NodeView(name, "m", NodeState.READY, Load(capacity=8)))
    nodes, _ = members.divided
    version, able = nodes.version, nodes.able
    for number in range(100):
        members.put(NodeView(NAMES[number % 12], "m", NodeState.READY, Load(number, number, 8), inflight=number))
        assert list(nodes.order(b"k", nodes.able)) == ranked(b"k", NAMES)
    assert (nodes.version, len(memory.heads), len(memory.whole)) == (version, 1, 1)
    assert nodes.able is able
    members.remove(NAMES[0])
    assert list(nodes.order(b"k", nodes.able)) == ranked(b"k", NAMES[1:])
    assert (len(memory.heads), len(memory.whole)) == (1, 2)


def test_another_capacity_makes_a_new_order_where_capacities_count() -> None:
    both = Both("weighted")
    for view in START:
        both.happen(view)
    for capacity in (1, 64, 8):
        for number in range(6):
            both.happen((Affinity(b"session:%d" % number, True), frozenset(), 0))
        both.happen(NodeView("n3", "m", NodeState.READY, Load(capacity=capacity)))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes were hashed, each time that some were."""
    numbers: list[int] = []

    def counted(key: bytes, names: Any) -> list[bytes]:
        found = weights(key, names)
        numbers.append(len(found))
        return found

    from ryzanstein.router.choose import members as module

    weights = module.weights
    monkeypatch.setattr(module, "weights", counted)
    return numbers


def test_a_known_key_is_not_hashed_again(hashed: list[int]) -> None:
    both = Both("affinity")
    for number in range(1000):
        both.happen(NodeView(f"n{number}", "m", NodeState.READY, Load(capacity=8)))
    for _ in range(10):
        ranking = both.chooser.rank(both.members, "m", Affinity(b"k", True))
        both.chooser.place(ranking, ranking.node_ids[0])
        assert ranking.node_ids[1]
    assert hashed == [1000]


def test_a_known_key_follows_some_changes_without_a_look_at_all_nodes(hashed: list[int]) -> None:
    members = Members()
    names = [f"n{number}" for number in range(200)]

    def put(name: str, capacity: int = 8) -> None:
        members.put(NodeView(name, "m", NodeState.READY, Load(capacity=capacity)))

    def first() -> list[int]:
        """Asks for the key's first four nodes, and returns how many were hashed for that."""
        hashed.clear()
        nodes, _ = members.divided
        assert [next(order) for order in [nodes.order(b"k", nodes.able)] for _ in range(4)] == ranked(b"k", names)[:4]
        return list(hashed)

    for name in names:
        put(name)
    assert first() == [200]
    ahead = next(name for name in (f"m{number}" for number in range(1000)) if ranked(b"k", [*names, name])[0] == name)
    for name in (ahead, "l1", "l2"):
        put(name)
        names.append(name)
    assert (first(), first()) == ([4 + 3], [])
    last = ranked(b"k", names)[-1]
    put(last, capacity=4)
    members.remove(last)
    names.remove(last)
    assert first() == []
    members.remove(ahead)
    names.remove(ahead)
    assert first() == [201]
    for number in range(70):
        put(f"k{number}")
        names.append(f"k{number}")
    assert first() == [271]


def test_the_memory_of_keys_is_bounded_and_forgets_what_was_not_asked_for_longest() -> None:
    heads = RecentOrders[tuple[str, ...]](max_entries=3)
    for key in range(5):
        heads.put(key, (str(key),))
        heads.find(2)
    assert len(heads) == 3
    assert [heads.find(key) for key in range(5)] == [None, None, ("2",), ("3",), ("4",)]


def test_an_order_is_read_no_further_than_it_is_asked_for() -> None:
    read: list[str] = []

    def nodes() -> Any:
        for name in NAMES[:5]:
            read.append(name)
            yield name

    order = LazyOrder(nodes())
    assert (bool(order), order[1], read) == (True, "n1", ["n0", "n1"])
    assert next(node_id for node_id in order if node_id != "n0") == "n1"
    assert len(read) == 2
    assert (list(order), order[-1], order[1:3], len(order)) == (NAMES[:5], "n4", ["n1", "n2"], 5)
    assert read == NAMES[:5]
    with pytest.raises(IndexError):
        order[5]
