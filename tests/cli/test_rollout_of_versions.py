"""How a new version of a model goes over nodes that serve several models, from what the orchestrator reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ryzanstein.cli.rollout.deployments import Assignments, DeploymentView, Shortage
from ryzanstein.cli.rollout.rollout import STEADY_S, Rollout, RolloutEnd
from ryzanstein.cluster import Deployment, ModelReport, Node, NodeState

READY, STARTING, DRAINING, FAILED = NodeState.READY, NodeState.STARTING, NodeState.DRAINING, NodeState.FAILED
GIB = 2**30
ASKED = Deployment("new", "/models/new", 3, revision=2)
OLD = ModelReport("new", "/models/old", 1, READY)
ALONGSIDE = replace(OLD, next_revision=2, next_state=STARTING)
REFUSED = replace(OLD, next_revision=2, next_state=FAILED, next_reason="no such file")
FINISHING = replace(OLD, state=DRAINING)
LOADING = ModelReport("new", "/models/new", 2, STARTING)
NEW = replace(LOADING, state=READY)
BROKEN = replace(LOADING, state=FAILED, reason="no such file")
DEMO = ModelReport("demo", "/models/demo", 0, READY, started_with=True)


class Looks:
    """A rollout and its clock: each look is a second, and a beat of every node, after the last."""

    def __init__(self, deployment: Deployment = ASKED) -> None:
        self.rollout = Rollout(deployment)
        self.now = 0.0

    def look(
        self, *, to: str = "abc", short: Iterable[Shortage] = (), halt: str = "", **nodes: Node | tuple[ModelReport, ...]
    ) -> list[str]:
        """Reports the models of each node, or an older node. Returns the lines that people see."""
        self.now += 1.0
        members = {
            name: Node(name, "", models=given, memory_bytes=8 * GIB) if isinstance(given, tuple) else given
            for name, given in nodes.items()
        }
        members = {name: replace(node, node_id=name, beat_time=self.now) for name, node in members.items()}
        view = DeploymentView(self.rollout.deployment, tuple(to), (), (), tuple(short), halt, bool(halt))
        changes = self.rollout.see(Assignments({"new": view}, members), self.now)
        return [f"{name} {phase.value}" for name, phase in changes]

    @property
    def ending(self) -> RolloutEnd | None:
        return self.rollout.ending({name: self.rollout.reason(name) for name in "abc"})


def test_a_version_is_loaded_beside_the_earlier_one() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    assert looks.look(to="a", a=(DEMO, OLD)) == ["a still serves the earlier version"]
    assert looks.look(to="a", a=(DEMO, ALONGSIDE)) == ["a loads it beside the earlier version"]
    assert looks.look(to="a", a=(DEMO, NEW)) == []
    assert looks.ending is None
    assert looks.look(to="a", a=(DEMO, NEW)) == ["a is ready"]
    assert looks.ending == RolloutEnd(True, "'new' is ready on 1 of 1 node: a")


def test_a_version_that_does_not_fit_beside_waits_for_the_nodes_work() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    looks.look(to="a", a=(OLD,))
    assert looks.look(to="a", a=(FINISHING,)) == ["a finishes its work first"]
    assert looks.look(to="a", a=(LOADING,)) == ["a loads"]
    looks.look(to="a", a=(NEW,))
    assert looks.look(to="a", a=(NEW,)) == ["a is ready"]


def test_three_nodes_change_one_after_the_other_and_the_earlier_version_does_not_count() -> None:
    looks = Looks()
    waiting = [f"{name} still serves the earlier version" for name in "abc"]
    assert looks.look(a=(OLD,), b=(OLD,), c=(OLD,)) == waiting
    for _ in range(2 * int(STEADY_S)):
        assert looks.look(a=(OLD,), b=(OLD,), c=(OLD,)) == []
        assert looks.ending is None
    assert looks.look(a=(ALONGSIDE,), b=(OLD,), c=(OLD,)) == ["a loads it beside the earlier version"]
    looks.look(a=(NEW,), b=(OLD,), c=(OLD,))
    assert looks.look(a=(NEW,), b=(ALONGSIDE,), c=(OLD,)) == ["a is ready", "b loads it beside the earlier version"]
    looks.look(a=(NEW,), b=(NEW,), c=(OLD,))
    assert looks.look(a=(NEW,), b=(NEW,), c=(ALONGSIDE,)) == ["b is ready", "c loads it beside the earlier version"]
    assert looks.ending is None
    looks.look(a=(NEW,), b=(NEW,), c=(NEW,))
    assert looks.look(a=(NEW,), b=(NEW,), c=(NEW,)) == ["c is ready"]
    assert looks.ending == RolloutEnd(True, "'new' is ready on 3 of 3 nodes: a, b, c")


def test_a_refused_version_ends_the_wait_and_the_earlier_one_goes_on() -> None:
    looks = Looks()
    looks.look(a=(OLD,), b=(OLD,), c=(OLD,))
    looks.look(a=(ALONGSIDE,), b=(OLD,), c=(OLD,))
    assert looks.look(a=(REFUSED,), b=(OLD,), c=(OLD,)) == ["a refused it and goes on with the earlier version"]
    assert looks.ending is None
    for _ in range(int(STEADY_S)):
        assert looks.look(a=(REFUSED,), b=(OLD,), c=(OLD,)) == []
    sentence = "'new' is not ready: 0 of 3 nodes; a refused it and goes on with the earlier version: no such file"
    assert looks.ending == RolloutEnd(False, sentence, earlier=True)


def test_a_tolerated_refusal_is_no_end_between_two_waves_and_a_halt_is() -> None:
    looks = Looks()
    for _ in range(20):
        looks.look(a=(NEW,), b=(REFUSED,), c=(OLD,))
    assert looks.ending is None
    for _ in range(4):
        looks.look(a=(NEW,), b=(REFUSED,), c=(OLD,), halt="1 of 3 nodes failed with it")
    assert looks.ending is not None
    assert "b refused it" in looks.ending.sentence


def test_nodes_that_read_different_files_end_the_wait_with_the_reason() -> None:
    looks = Looks()
    for _ in range(3 + int(STEADY_S)):
        looks.look(a=(NEW,), b=(NEW,), c=(OLD,), halt="a and b have different files")
    assert looks.ending is not None
    assert looks.ending.sentence.endswith("; halted: a and b have different files")


def test_a_refusal_counts_although_the_node_reports_it_only_once() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    looks.look(to="a", a=(OLD,))
    looks.look(to="a", a=(REFUSED,))
    for _ in range(1 + int(STEADY_S)):
        assert looks.look(to="a", short=[Shortage("a", 0, "no such file")], a=(OLD,)) == []
    assert looks.ending is not None
    assert looks.ending.sentence.endswith("goes on with the earlier version: no such file")


def test_a_refusal_that_only_the_orchestrator_has_seen_counts() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    looks.look(to="a", a=(OLD,))
    refused = [Shortage("a", 0, "no such file")]
    assert looks.look(to="a", short=refused, a=(OLD,)) == ["a refused it and goes on with the earlier version"]


def test_a_refusal_from_before_is_none_of_a_second_attempt() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    assert looks.look(to="a", a=(REFUSED,)) == ["a is assigned"]
    assert looks.look(to="a", a=(ALONGSIDE,)) == ["a loads it beside the earlier version"]


def test_a_version_that_fails_where_it_took_the_place_of_the_earlier_one_leaves_the_others_alone() -> None:
    looks = Looks()
    looks.look(a=(LOADING,), b=(OLD,), c=(OLD,))
    for _ in range(2 + int(STEADY_S)):
        looks.look(a=(BROKEN,), b=(OLD,), c=(OLD,))
    assert looks.ending == RolloutEnd(False, "'new' is not ready: 0 of 3 nodes; a failed: no such file", earlier=True)


def test_what_a_node_was_started_with_counts_when_it_has_taken_the_revision() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    started = replace(NEW, revision=0, started_with=True)
    assert looks.look(to="a", a=(started,)) == ["a is assigned"]
    for _ in range(3):
        assert looks.look(to="a", a=(started,)) == []
    looks.look(to="a", a=(NEW,))
    assert looks.look(to="a", a=(NEW,)) == ["a is ready"]


@pytest.mark.parametrize(
    ("short", "why"),
    [
        ([Shortage("c", int(3.1 * GIB), "it needs 4 GiB")], "c lacks 3.1 GiB"),
        ([Shortage("c", 300 * 2**20, "")], "c lacks 300 MiB"),
        ([Shortage("c", 0, "no such file")], "c: no such file"),
    ],
)
def test_nodes_that_cannot_take_it_are_named_with_what_they_lack(short: list[Shortage], why: str) -> None:
    looks = Looks()
    for _ in range(3 + int(STEADY_S)):
        looks.look(to="ab", short=short, a=(NEW,), b=(NEW,), c=(DEMO,))
    sentence = f"'new' is ready on 2 of 3 nodes, no free node (the cluster has 3, {why}): a, b"
    assert looks.ending == RolloutEnd(True, sentence)


def test_many_short_nodes_are_counted_and_drained_ones_are_called_drained() -> None:
    looks = Looks(replace(ASKED, replicas=9))
    short = [Shortage(name, GIB, "") for name in "bcdefg"]
    nodes: dict[str, tuple[ModelReport, ...] | Node] = dict.fromkeys("abcdef", (DEMO,))
    drained = Node("g", "", models=(DEMO,), memory_bytes=8 * GIB, drain_requested=True)
    looks.look(to="a", short=short, g=drained, **nodes)
    lacks = ", ".join(f"{name} lacks 1.0 GiB" for name in "bcde")
    counts = f"the cluster has 7, {lacks}, 1 more cannot take it, 1 drained"
    assert looks.rollout.count() == f"0 of 9 nodes, no free node ({counts})"


def test_an_older_node_among_newer_ones_is_followed_by_its_one_model() -> None:
    looks = Looks(replace(ASKED, replicas=2))
    old = Node("b", "", state=READY, model="demo")
    assert looks.look(to="ab", a=(OLD,), b=old) == ["a still serves the earlier version", "b is assigned"]
    lines = looks.look(to="ab", a=(ALONGSIDE,), b=replace(old, state=DRAINING))
    assert lines == ["a loads it beside the earlier version", "b finishes its work first"]
    assert looks.look(to="ab", a=(NEW,), b=Node("b", "", state=STARTING)) == ["b loads"]
    done = Node("b", "", state=READY, model="new")
    assert looks.look(to="ab", a=(NEW,), b=done) == ["a is ready"]
    assert looks.look(to="ab", a=(NEW,), b=done) == ["b is ready"]
    assert looks.ending == RolloutEnd(True, "'new' is ready on 2 of 2 nodes: a, b")


def test_only_what_gives_way_is_displaced() -> None:
    before = {"a": Node("a", "", models=(DEMO,), memory_bytes=GIB), "b": Node("b", "", state=READY, model="other")}
    looks = Looks(replace(ASKED, replicas=1))
    looks.look(to="a", a=(DEMO, LOADING), b=before["b"])
    assert looks.rollout.displaced(before) == []
    looks.look(to="a", a=(LOADING,), b=before["b"])
    assert looks.rollout.displaced(before) == ["demo"]
    looks.look(to="ab", a=(LOADING,), b=before["b"])
    assert looks.rollout.displaced(before) == ["demo", "other"]


def test_a_model_that_fell_asleep_again_is_ready() -> None:
    looks = Looks(replace(ASKED, replicas=1))
    for _ in range(3):
        looks.look(to="a", a=(replace(LOADING, asleep=True),))
    assert looks.ending == RolloutEnd(True, "'new' is ready on 1 of 1 node: a")
