"""A model that no node can serve must not take node after node away from the models that they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ryzanstein.cluster import Deployment, ModelNeed, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.placement import Assigned, Reports, place
from ryzanstein.orchestrator.placing.replicas.refusals import REMEMBER_S, Refusals
from ryzanstein.orchestrator.state.stored import StoredRefusal

BROKEN = Deployment("broken", "/models/broken", 1, 1)


class Cluster:
    """Nodes that serve a good model, and fail with the broken one."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.nodes = {name: Node(name, "", "first", state=NodeState.READY, model="good") for name in names}
        self.refusals = Refusals(lambda: self.now)
        self.deployment = BROKEN
        self._placed: Assigned = {}

    def round(self, reported: str = "broken") -> str:
        """The node that is chosen now. It fails, and who is not chosen serves its own model again."""
        nodes = list(self.nodes.values())
        self.refusals.note(nodes, self._placed)
        failed = self.refusals.of([self.deployment], nodes)
        self._placed = place([self.deployment], nodes, Reports(failed)).assigned
        (chosen,) = self._placed
        for name, node in self.nodes.items():
            failed = name == chosen
            state, model = (NodeState.FAILED, reported) if failed else (NodeState.READY, "good")
            self.nodes[name] = replace(node, state=state, model=model)
        return chosen


@pytest.mark.parametrize("reported", ["broken", ""], ids=["refused by ranks", "not even read"])
@pytest.mark.parametrize("names", ["a", "ab", "abcde"])
def test_a_model_that_fails_on_every_node_stays_where_it_failed_last(names: str, reported: str) -> None:
    cluster = Cluster(*names)
    taken = [cluster.round(reported) for _ in range(len(names) + 5)]
    assert sorted(taken[: len(names)]) == sorted(names), "each was tried once"
    assert set(taken[len(names) :]) == {taken[len(names) - 1]}


def test_another_revision_a_restart_and_a_new_deployment_are_a_new_chance() -> None:
    for chance in ("revision", "restart", "deployed again", "time"):
        cluster = Cluster("a", "b")
        first, second = cluster.round(), cluster.round()
        assert {first, second} == {"a", "b"}
        assert cluster.round() == second
        if chance == "revision":
            cluster.deployment = replace(BROKEN, path="/models/mended", revision=2)
        elif chance == "restart":
            cluster.nodes[first] = replace(cluster.nodes[first], incarnation="second")
        elif chance == "time":
            cluster.now += REMEMBER_S + 1
        else:
            cluster.refusals.forget("broken")
        assert cluster.round() == first, chance


def test_a_node_that_fails_with_its_own_model_has_refused_nothing() -> None:
    cluster = Cluster("a", "b")
    nodes = {name: replace(node, state=NodeState.FAILED) for name, node in cluster.nodes.items()}
    placed = place([BROKEN], nodes.values()).assigned
    cluster.refusals.note(nodes.values(), placed)
    assert cluster.refusals.of([BROKEN], nodes.values()) == frozenset()


def test_what_was_refused_is_still_refused_after_a_restart_for_as_long_as_it_was_to_be() -> None:
    cluster = Cluster("a", "b")
    first = cluster.round()
    cluster.round()
    cluster.now += 100
    stored = cluster.refusals.unwritten()
    assert stored is not None
    assert [(each.node_id, each.model, each.revision) for each in stored] == [(first, "broken", 1)]
    cluster.refusals.wrote(stored)
    assert cluster.refusals.unwritten() is None
    again = Refusals(lambda: cluster.now, stored)
    assert again.unwritten() is None
    nodes = list(cluster.nodes.values())
    left_s = stored[0].left_s
    assert REMEMBER_S - 101 < left_s < REMEMBER_S
    for moment, remembered in ((left_s - 1, True), (left_s + 1, False)):
        later = Refusals(lambda: 0.0, [replace(stored[0], left_s=left_s - moment)])
        assert bool(later.of([BROKEN], nodes)) is remembered
    assert again.of([BROKEN], nodes) == {(first, "broken")}


def test_what_is_left_of_a_refusal_is_stored_once_a_minute_so_that_restarts_do_not_make_it_longer() -> None:
    """An orchestrator that is started again and again must not refuse a repaired node for ever."""
    cluster = Cluster()
    stored = (StoredRefusal("a", "m", "1", 1, REMEMBER_S, "why"),)
    for _ in range(40):
        refusals = Refusals(lambda: cluster.now, stored)
        if not refusals.of([Deployment("m", "/m", revision=1)], [Node("a", "a:1", "1")]):
            break
        for _ in range(20):
            cluster.now += 5.0
            if (rows := refusals.unwritten()) is not None:
                stored = rows
                refusals.wrote(rows)
    assert REMEMBER_S <= cluster.now <= REMEMBER_S + 100 + 10 * 60


def starting(name: str, revision: int) -> Node:
    report = ModelReport("m", "/m", revision, NodeState.RECOVERING, memory_bytes=10)
    return Node(name, "h:1", "first", models=(report,), memory_bytes=100)


def test_a_model_leaves_a_node_that_tries_again_what_failed_there_and_not_one_that_restarts_the_revision_before() -> None:
    new, spare = Deployment("m", "/m", 1, 2), Node("b", "h:1", "first", memory_bytes=100)
    needs = {name: {"/m": ModelNeed("/m", 10)} for name in "ab"}
    before = {"a": (new,)}
    placed = {
        revision: place([new], [starting("a", revision), spare], Reports({("a", "m")}, needs, before)).assigned.keys()
        for revision in (1, 2)
    }
    assert placed == {1: {"a"}, 2: {"b"}}
    alone = place([new], [starting("a", 2)], Reports({("a", "m")}, needs, before)).assigned.keys()
    assert alone == {"a"}, "no other node has room"
