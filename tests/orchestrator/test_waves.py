"""A new revision in waves, against simulated replicas on a clock of their own."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.cluster import (
    MODEL_CHANGES,
    Deployment,
    Load,
    LoadProgress,
    ModelNeed,
    ModelReport,
    Node,
    NodeState,
    RolloutLimits,
)
from ryzanstein.orchestrator.placing.rolling import RollingChanges
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds

READY, STARTING, FAILED = NodeState.READY, NodeState.STARTING, NodeState.FAILED
NEW = Deployment("m", "/new", revision=2)
CAPACITY = 8


@dataclass
class Replicas:
    """Nodes that load a revision when told to, in place or beside the earlier one. A load takes `load_s`."""

    count: int
    load_s: float = 60.0
    beside: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    stuck: frozenset[int] = frozenset()
    demand: int = 0
    per_host: int = 1
    bounds: RolloutBounds = field(default_factory=RolloutBounds)
    wanted: Deployment = NEW
    now: float = 0.0

    def __post_init__(self) -> None:
        self.reports = [ModelReport("m", "/old", 1, READY, memory_bytes=60) for _ in range(self.count)]
        self.began: dict[int, float] = {}
        self.rolling = RollingChanges(lambda: self.now, self.bounds)
        self.failed: set[tuple[str, str]] = set()
        self.least_ready = self.count
        self.most_at_once = 0

    def node(self, i: int, running: int) -> Node:
        report = self.reports[i]
        load = Load(running=running, capacity=CAPACITY) if report.state is READY else Load()
        memory = 200 if i in self.beside else 100
        host = f"host-{i // self.per_host}" if self.per_host > 1 else ""
        models = (replace(report, load=load),)
        return Node(f"n{i:04}", "h:1", "1", models=models, memory_bytes=memory, host=host)

    @property
    def ready(self) -> int:
        return sum(report.state is READY for report in self.reports)

    @property
    def done(self) -> int:
        return sum(report.revision == 2 and report.state is READY for report in self.reports)

    def step(self, seconds: float = 1.0) -> None:
        each, rest = divmod(self.demand, max(1, self.ready))
        first = next((i for i, report in enumerate(self.reports) if report.state is READY), 0)
        nodes = [self.node(i, each + rest if i == first else each) for i in range(self.count)]
        needs = {node.node_id: {"/new": ModelNeed("/new", 60)} for node in nodes}
        self.rolling.update({node.node_id: (self.wanted,) for node in nodes}, nodes, self.failed, needs)
        for i, node in enumerate(nodes):
            if (
                self.rolling.instructed(node, self.wanted).revision == 2
                and self.reports[i].revision == 1
                and i not in self.began
            ):
                self.began[i] = self.now
                old = self.reports[i]
                self.reports[i] = (
                    replace(old, next_revision=2, next_state=STARTING)
                    if i in self.beside
                    else ModelReport("m", "/new", 2, STARTING, memory_bytes=60)
                )
        self.now += seconds
        for i, began in list(self.began.items()):
            if i in self.stuck or self.now - began < self.load_s:
                continue
            del self.began[i]
            if i in self.failing:
                self.failed.add((f"n{i:04}", "m"))
                self.reports[i] = ModelReport("m", "/old", 1, READY, memory_bytes=60, next_revision=2, next_state=FAILED)
            else:
                self.reports[i] = ModelReport("m", "/new", 2, READY, memory_bytes=60)
        self.least_ready = min(self.least_ready, self.ready)
        self.most_at_once = max(self.most_at_once, len(self.began))

    def run(self, limit_s: float, step_s: float = 1.0) -> None:
        while self.done < self.count and self.now < limit_s:
            self.step(step_s)


def test_a_thousand_replicas_change_in_twenty_minutes_and_nine_hundred_are_always_ready() -> None:
    replicas = Replicas(1000, demand=5000)
    replicas.run(3600, 2.5)
    assert replicas.done == 1000
    assert replicas.now < 1200, "one after the other they would take 17 hours"
    assert replicas.least_ready == 900
    assert replicas.most_at_once == 100


def test_the_first_waves_double() -> None:
    replicas = Replicas(100, bounds=RolloutBounds(max_unavailable=0.5))
    sizes = []
    for _ in range(10):
        replicas.step()
        assert not replicas.began, "what runs and waits is looked at first"
    for _ in range(5):
        replicas.step()
        sizes.append(len(replicas.began))
        while replicas.began:
            replicas.step()
        for _ in range(10):
            replicas.step()
    assert sizes == [1, 2, 4, 8, 16]


def test_what_fits_beside_the_earlier_revision_costs_no_capacity_and_comes_first() -> None:
    replicas = Replicas(
        10, beside=frozenset({7, 8, 9}), demand=10 * CAPACITY, bounds=RolloutBounds(max_unavailable=1, progress_s=5000)
    )
    replicas.run(1000)
    assert replicas.done == 3, "the others cannot be spared"
    assert replicas.least_ready == 10
    assert "no replica can be spared" in replicas.rolling.waits_for("m")
    replicas.demand = CAPACITY
    replicas.run(1050)
    assert replicas.done == 3, "what was asked for in the last minute counts"
    replicas.run(3000)
    assert replicas.done == 10


def test_an_outage_that_is_allowed_takes_one_replica_at_a_time() -> None:
    replicas = Replicas(4, demand=4 * CAPACITY, bounds=RolloutBounds(max_unavailable=1))
    replicas.run(200)
    assert replicas.done == 0
    replicas.wanted = replace(NEW, rollout=RolloutLimits(allow_outage=True))
    replicas.run(2000)
    assert (replicas.done, replicas.least_ready) == (4, 3)


def test_a_cluster_that_is_always_full_changes_one_at_a_time_in_the_end() -> None:
    replicas = Replicas(4, demand=4 * CAPACITY, bounds=RolloutBounds(max_unavailable=1, progress_s=300))
    replicas.run(300)
    assert (replicas.done, "no replica can be spared" in replicas.rolling.waits_for("m")) == (0, True)
    replicas.run(2000)
    assert (replicas.done, replicas.least_ready) == (4, 3)
    assert replicas.now < 700, "it waits once, not for each"


def test_a_single_replica_changes_though_nobody_stands_in_for_it() -> None:
    replicas = Replicas(1, demand=CAPACITY)
    replicas.run(100)
    assert replicas.done == 1


def test_one_that_cannot_be_spared_holds_up_no_other() -> None:
    replicas = Replicas(3, demand=10, bounds=RolloutBounds(max_unavailable=1))
    small = frozenset({1, 2})
    node = replicas.node

    def sized(i: int, running: int) -> Node:
        made = node(i, running)
        report = made.models[0]
        if report.state is not READY:
            return made
        load = replace(report.load, capacity=2, running=0) if i in small else replace(report.load, capacity=16, running=10)
        return replace(made, models=(replace(report, load=load),))

    replicas.node = sized  # type: ignore[method-assign]
    replicas.run(200)
    assert {i for i, report in enumerate(replicas.reports) if report.revision == 2} == small


def test_a_replica_that_sleeps_stands_in_for_one_that_changes() -> None:
    replicas = Replicas(3, demand=2, bounds=RolloutBounds(max_unavailable=1))
    for i in (0, 1):
        replicas.reports[i] = ModelReport("m", "/old", 1, STARTING, asleep=True, memory_bytes=60)
    replicas.run(300)
    assert replicas.done == 3


def test_no_two_replicas_of_a_host_change_while_another_host_has_some() -> None:
    replicas = Replicas(40, per_host=4, bounds=RolloutBounds(max_unavailable=0.25))
    while replicas.done < 40:
        replicas.step()
        hosts = [i // 4 for i in replicas.began]
        left = {i // 4 for i, report in enumerate(replicas.reports) if report.revision == 1}
        assert len(hosts) == len(set(hosts)) or not left - set(hosts)
        assert replicas.now < 3600


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.floats(0.1, 1.0), st.integers(0, 60), st.integers(0, 2**32))
def test_no_host_loses_more_replicas_than_another_that_has_candidates(per: int, share: float, demand: int, seed: int) -> None:
    """Also where the replicas of the other host are too large to be spared."""
    chance = random.Random(seed)
    count = per * chance.randrange(1, 5)
    sizes = [chance.choice((1, 4, 30)) for _ in range(count)]
    replicas = Replicas(count, load_s=20, per_host=per, demand=demand, bounds=RolloutBounds(max_unavailable=share))
    node = replicas.node

    def sized(i: int, running: int) -> Node:
        made = node(i, running)
        (report,) = made.models
        load = replace(report.load, capacity=sizes[i]) if report.state is READY else report.load
        return replace(made, models=(replace(report, load=load),))

    replicas.node = sized  # type: ignore[method-assign]
    for _ in range(150):
        before = set(replicas.began)
        replicas.step()
        changing = Counter(i // per for i in replicas.began)
        left = [changing[i // per] for i, report in enumerate(replicas.reports) if report.revision == 1]
        for i in set(replicas.began) - before:
            assert not left or changing[i // per] <= min(left) + 1


@pytest.mark.parametrize(("contents", "done"), [("aab", 3), ("aaa", 10), ("aa", 10), ("", 10)])
def test_new_replicas_of_other_files_halt_the_change(contents: str, done: int) -> None:
    """Also with an orchestrator that did not see the first of them. Nodes that do not say what they have are no difference."""
    replicas = Replicas(10, load_s=20)
    node = replicas.node

    def with_content(i: int, running: int) -> Node:
        made = node(i, running)
        (report,) = made.models
        content = contents[i] if report.revision == 2 and i < len(contents) else "old" if report.revision == 1 else ""
        return replace(made, models=(replace(report, content=content),))

    replicas.node = with_content  # type: ignore[method-assign]
    while replicas.done < 3:
        replicas.step()
    replicas.rolling = RollingChanges(lambda: replicas.now, replicas.bounds)
    replicas.run(1000)
    assert replicas.done == done
    if done < 10:
        halt = replicas.rolling.halts.find(NEW)
        assert halt is not None
        assert halt.lasting
        assert halt.reason.startswith("n0000 and n0002 have different files of this revision")


@pytest.mark.parametrize(("count", "failing", "reached"), [(10, {0}, 0), (10, {1}, 1), (1000, set(range(500, 520)), 980)])
def test_failures_halt_the_change(count: int, failing: set[int], reached: int) -> None:
    replicas = Replicas(count, failing=frozenset(failing))
    replicas.run(1300, 10.0)
    assert replicas.done == reached
    halted = len(failing) > 0.02 * count or not reached
    assert bool(replicas.rolling.waits_for("m")) is halted


def test_more_failures_than_the_share_halt_the_change_early() -> None:
    replicas = Replicas(1000, failing=frozenset(range(500, 1000)))
    replicas.run(1300, 10.0)
    assert replicas.done <= 520
    assert 20 < len(replicas.failed) <= 121
    assert "of 1000 nodes failed with it" in replicas.rolling.waits_for("m")


def test_a_change_that_does_not_move_halts_and_goes_on_when_it_moves() -> None:
    replicas = Replicas(20, stuck=frozenset({0}), bounds=RolloutBounds(max_unavailable=0.2))
    replicas.run(601)
    assert (replicas.done, replicas.rolling.waits_for("m")) == (0, "")
    replicas.run(700)
    assert replicas.rolling.waits_for("m") == "no progress for 600 s on n0000"
    replicas.reports[0] = replace(replicas.reports[0], progress=LoadProgress("read", 1, 2))
    replicas.step()
    assert replicas.rolling.waits_for("m") == ""
    replicas.stuck = frozenset()
    replicas.run(3000)
    assert replicas.done == 20


def test_no_halt_is_found_or_lifted_by_some_of_the_nodes_while_others_are_not_back() -> None:
    replicas = Replicas(10, failing=frozenset({2}), bounds=RolloutBounds(max_unavailable=0.2, max_failed=0.2))
    while not replicas.failed:
        replicas.step()
    nodes = [replicas.node(i, 0) for i in range(10)]
    needs = {node.node_id: {"/new": ModelNeed("/new", 60)} for node in nodes}
    given = {node.node_id: (NEW,) for node in nodes}
    next_one = RollingChanges(lambda: replicas.now, replicas.bounds)
    next_one.update(given, nodes[2:3], replicas.failed, needs, all_known=False)
    assert next_one.waits_for("m") == "", "one of ten has failed, not one of one"
    next_one.halts.put(NEW, "no progress for 600 s on n0000", lasting=False)
    next_one.update(given, nodes[8:9], replicas.failed, needs, all_known=False)
    next_one.update(given, nodes[7:9], replicas.failed, needs, all_known=False)
    assert next_one.waits_for("m") == "no progress for 600 s on n0000"


def test_a_node_that_comes_and_goes_is_no_progress_of_another() -> None:
    replicas = Replicas(20, stuck=frozenset({0}), bounds=RolloutBounds(max_unavailable=0.2))
    replicas.run(100)
    while replicas.now < 700:
        replicas.reports[5] = replace(replicas.reports[5], state=READY if replicas.reports[5].state is STARTING else STARTING)
        replicas.step()
    assert replicas.rolling.waits_for("m") == "no progress for 600 s on n0000"


def test_a_replica_that_recovers_for_a_moment_makes_no_tolerated_failure_a_halt() -> None:
    replicas = Replicas(10, failing=frozenset({1}), bounds=RolloutBounds(max_unavailable=0.5, max_failed=0.2))
    while not replicas.failed:
        replicas.step()
    changed = [i for i, report in enumerate(replicas.reports) if report.revision == 2]
    for state in (STARTING, READY):
        for i in changed:
            replicas.reports[i] = replace(replicas.reports[i], state=state)
        replicas.step()
    replicas.run(2000)
    assert replicas.done == 9


def test_a_node_that_was_drained_directly_keeps_no_place() -> None:
    replicas = Replicas(5, bounds=RolloutBounds(max_unavailable=0.2))
    replicas.reports[0] = replace(replicas.reports[0], state=NodeState.DRAINING, reason="drained")
    replicas.run(600)
    assert replicas.done == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(0, 300), st.floats(0.05, 1.0), st.integers(0, 2**32))
def test_neither_bound_is_broken_whatever_happens(count: int, demand: int, share: float, seed: int) -> None:
    """Also with restarts of the orchestrator, which remembers nothing."""
    chance = random.Random(seed)
    beside = frozenset(i for i in range(count) if chance.random() < 0.3)
    bounds = RolloutBounds(max_unavailable=share, progress_s=5000)
    replicas = Replicas(count, load_s=20, beside=beside, demand=min(demand, count * CAPACITY), bounds=bounds)
    needed = min(replicas.count, -(-min(demand, count * CAPACITY) * 12 // (10 * CAPACITY)))
    for _ in range(400):
        if chance.random() < 0.05:
            replicas.rolling = RollingChanges(lambda: replicas.now, bounds)
        before = set(replicas.began)
        replicas.step(chance.choice((0.5, 1.0, 5.0)))
        assert len(replicas.began) <= max(1, int(share * count))
        in_place = set(replicas.began) - before - beside
        assert not in_place or replicas.ready >= needed, "what it took left enough"


def turns(rolling: RollingChanges, nodes: list[Node], wanted: Deployment, *, all_known: bool = True) -> set[str]:
    """Returns the nodes that change to a revision now."""
    needs = {node.node_id: {wanted.path: ModelNeed(wanted.path, 60)} for node in nodes}
    rolling.update({node.node_id: (wanted,) for node in nodes}, nodes, (), needs, all_known=all_known)
    return {node.node_id for node in nodes if rolling.instructed(node, wanted) == wanted}


def test_none_begins_before_all_nodes_are_known() -> None:
    """The one that is not back yet may be changing, by the word of the leader before."""
    rolling = RollingChanges(lambda: 0.0, RolloutBounds(min_ready_s=0.0))
    back = [Node(name, f"{name}:1", "1", models=(ModelReport("m", "/old", 1, READY),), memory_bytes=100) for name in "ab"]
    assert turns(rolling, back, NEW, all_known=False) == set()
    late = Node(
        "c", "c:1", "1", models=(ModelReport("m", "/old", 1, READY, next_revision=2, next_state=STARTING),), memory_bytes=100
    )
    assert turns(rolling, [*back, late], NEW, all_known=False) == {"c"}
    assert turns(rolling, [*back, late], NEW) == {"c"}


@pytest.mark.parametrize(
    "busy",
    [
        ModelReport("m", "/old", 1, READY, next_revision=2, next_state=STARTING),
        ModelReport("m", "/new", 2, STARTING),
        ModelReport("m", "/old", 1, NodeState.RECOVERING),
        ModelReport("m", "/new", 2, NodeState.DRAINING, reason=f"draining: {MODEL_CHANGES}"),
    ],
)
def test_a_newer_revision_waits_for_nodes_that_do_not_serve_or_still_change_to_the_one_before(busy: ModelReport) -> None:
    rolling = RollingChanges(lambda: 0.0, RolloutBounds(min_ready_s=0.0))
    newer = Deployment("m", "/newer", revision=3)
    nodes = [Node(name, f"{name}:1", "1", models=(ModelReport("m", "/old", 1, READY),), memory_bytes=100) for name in "ab"]
    assert turns(rolling, [*nodes, Node("c", "c:1", "1", models=(busy,), memory_bytes=100)], newer) == {"c"}


def test_a_node_that_vanishes_while_it_changes_keeps_its_place_for_a_minute() -> None:
    """It may be cut off from the orchestrator alone, and serve nobody until it has changed."""
    now = [0.0]
    rolling = RollingChanges(lambda: now[0], RolloutBounds(min_ready_s=0.0))
    nodes = [Node(name, f"{name}:1", "1", models=(ModelReport("m", "/old", 1, READY),), memory_bytes=100) for name in "abc"]
    assert turns(rolling, nodes, NEW) == {"a"}
    assert turns(rolling, nodes[1:], NEW) == set()
    assert turns(rolling, nodes, NEW) == {"a"}
    assert turns(rolling, nodes[1:], NEW) == set()
    now[0] += 61
    assert turns(rolling, nodes[1:], NEW) == {"b"}
