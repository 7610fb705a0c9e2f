"""When a deployment counts as ready, failed or short of nodes, from what the orchestrator reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ryzanstein.cli.rollout.deployments import Assignments, DeploymentView
from ryzanstein.cli.rollout.rollout import STEADY_S, Phase, Rollout, RolloutEnd
from ryzanstein.cluster import Deployment, Node, NodeState

READY, STARTING, DRAINING, FAILED = NodeState.READY, NodeState.STARTING, NodeState.DRAINING, NodeState.FAILED
ASKED = Deployment("new", "/models/new", 2)
OTHER = DeploymentView(Deployment("other", "/models/other", 1), ("c",), ("c",))


class Story:
    """A rollout and its clock: each look is a second, and a beat of every node, after the last."""

    def __init__(self, deployment: Deployment = ASKED) -> None:
        self.rollout = Rollout(deployment)
        self.now = 0.0

    def look(self, *, to: str = "ab", nodes: str = "ab", beats: bool = True, **states: tuple[NodeState, str]) -> list[str]:
        """Reports nodes as (state, model); the others are READY with `old`. Returns the lines that people see."""
        self.now += 1.0
        beat_time = self.now if beats else 0.5
        reports = {name: states.get(name, (READY, "old")) for name in nodes}
        members = {
            name: Node(name, "", state=state, model=model, beat_time=beat_time) for name, (state, model) in reports.items()
        }
        views = {"new": DeploymentView(self.rollout.deployment, tuple(to), ())}
        if "c" in nodes:
            views["other"] = OTHER
        changes = self.rollout.see(Assignments(views, members), self.now)
        return [f"{name} {phase.value}" for name, phase in changes]

    @property
    def ending(self) -> RolloutEnd | None:
        return self.rollout.ending({"a": "no such file", "b": "no such file"})


def test_nodes_are_ready_after_they_finished_their_work_and_loaded() -> None:
    story = Story()
    assert story.look() == ["a is assigned", "b is assigned"]
    assert story.look(a=(DRAINING, "old")) == ["a finishes its work first"]
    assert story.look(a=(STARTING, ""), b=(STARTING, "")) == ["a loads", "b loads"]
    assert story.look(a=(READY, "new"), b=(STARTING, "")) == []
    assert story.look(a=(READY, "new"), b=(STARTING, "")) == ["a is ready"]
    assert story.ending is None
    story.look(a=(READY, "new"), b=(READY, "new"))
    story.look(a=(READY, "new"), b=(READY, "new"))
    assert story.ending == RolloutEnd(True, "'new' is ready on 2 of 2 nodes: a, b")


def test_a_node_that_was_ready_under_the_same_name_counts_when_it_has_had_the_time_to_change() -> None:
    story = Story(replace(ASKED, replicas=1))
    old = (READY, "new")
    story.look(to="a", a=old)
    story.look(to="a", a=old)
    assert story.ending is None, "this beat may have been sent before the node knew"
    assert story.look(to="a", a=(STARTING, "")) == ["a loads"]
    story.look(to="a", a=old)
    assert story.ending is None
    story.look(to="a", a=old)
    assert story.ending is not None
    assert story.ending.ready


def test_a_look_without_a_new_beat_proves_nothing() -> None:
    story = Story(replace(ASKED, replicas=1))
    for _ in range(5):
        story.look(to="a", beats=False, a=(READY, "new"))
    assert story.ending is None


def test_a_failure_that_lasts_ends_the_wait_with_its_reason() -> None:
    story = Story()
    for _ in range(3):
        lines = story.look(a=(FAILED, ""), b=(READY, "new"))
    assert lines == ["a failed", "b is ready"]
    assert story.ending is None
    for _ in range(int(STEADY_S)):
        story.look(a=(FAILED, ""), b=(READY, "new"))
    assert story.ending == RolloutEnd(False, "'new' is not ready: 1 of 2 nodes; a failed: no such file")


def test_a_failure_from_before_is_none_of_the_new_model() -> None:
    story = Story(replace(ASKED, replicas=1))
    story.look(to="a", a=(FAILED, "old"))
    assert story.look(to="a", a=(FAILED, "old")) == []
    assert story.look(to="a", a=(STARTING, "")) == ["a loads"]


def test_a_model_that_fails_on_node_after_node_is_given_up() -> None:
    story = Story(replace(ASKED, replicas=1))
    story.look(to="a")
    story.look(to="a", a=(STARTING, ""))
    assert story.look(to="b", a=(FAILED, "new")) == ["a failed", "b is assigned"]
    assert story.ending is None
    story.look(to="b", b=(STARTING, ""))
    assert story.look(to="a", b=(FAILED, "new")) == ["b failed", "a is assigned"]
    assert story.ending == RolloutEnd(False, "'new' is not ready: 0 of 1 node; b failed: no such file")


@pytest.mark.parametrize(("to", "ready"), [("ab", True), ("", False)])
def test_too_few_nodes_are_named_and_who_has_the_others(to: str, ready: bool) -> None:
    story = Story(replace(ASKED, replicas=3))
    new = (READY, "new")
    story.look(to=to, nodes="abc", a=new, b=new)
    assert story.ending is None
    for _ in range(2 + int(STEADY_S)):
        story.look(to=to, nodes="abc", a=new, b=new)
    assert story.ending is not None
    assert story.ending.ready is ready
    shortage = f"{len(to)} of 3 nodes, no free node (the cluster has 3, 1 assigned to other models)"
    assert shortage in story.ending.sentence


def test_a_cluster_without_nodes_is_waited_for() -> None:
    story = Story()
    for _ in range(9):
        story.look(to="", nodes="")
    assert story.ending is None
    assert story.rollout.waiting_for() == "no node is assigned"


def test_a_node_that_leaves_the_cluster_is_waited_for_again_when_it_is_back() -> None:
    story = Story(replace(ASKED, replicas=1))
    new = (READY, "new")
    story.look(to="a", a=new)
    assert story.look(to="", nodes="") == ["a is no member now"]
    assert story.look(to="a", a=new) == ["a is assigned"]
    assert story.ending is None
    story.look(to="a", a=new)
    assert story.look(to="a", a=new) == ["a is ready"]


def test_a_deployment_that_others_changed_or_removed_is_waited_for_no_longer() -> None:
    rollout = Rollout(ASKED)
    rollout.see(Assignments({}, {}), 0.0)
    assert rollout.ending({}) == RolloutEnd(False, "'new' was removed meanwhile", in_force=False)
    theirs = DeploymentView(replace(ASKED, path="/models/theirs"), ("a",), ("a",))
    rollout.see(Assignments({"new": theirs}, {}), 1.0)
    assert rollout.ending({}) == RolloutEnd(False, "'new' was deployed anew meanwhile, from /models/theirs", in_force=False)


def test_models_that_lose_their_last_node_are_named() -> None:
    before = {name: Node(name, "", state=READY, model=model) for name, model in (("a", "lost"), ("b", "kept"), ("c", "kept"))}
    story = Story()
    story.look(to="ab", nodes="abc", c=(READY, "kept"))
    assert story.rollout.displaced(before) == ["lost"]


def test_every_node_is_wanted_without_a_number() -> None:
    story = Story(replace(ASKED, replicas=0))
    for _ in range(3):
        story.look(a=(READY, "new"), b=(READY, "new"))
    assert story.ending == RolloutEnd(True, "'new' is ready on 2 of 2 nodes: a, b")
    assert Phase.READY.value == "is ready"
