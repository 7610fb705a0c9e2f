"""What may be changed from a watch, and what is asked before."""

from __future__ import annotations

from typing import Any

import pytest

from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.watch.actions import READ_ONLY, NodeAct, Operator, Proposal, Refusal, propose
from ryzanstein.cluster import ModelReport, Node, NodeState
from ryzanstein.rpc.client import PLAIN

DRAIN, UNDRAIN = NodeAct.DRAIN, NodeAct.UNDRAIN


def proposed(act: NodeAct, node_id: str, status: Any, *, read_only: bool = False) -> Proposal:
    found = propose(act, node_id, status, read_only=read_only)
    assert isinstance(found, Proposal)
    return found


def refused(act: NodeAct, node_id: str, status: Any, *, read_only: bool = False) -> str:
    found = propose(act, node_id, status, read_only=read_only)
    assert isinstance(found, Refusal)
    return found.why


def member(node_id: str, *, ready: bool = True) -> Node:
    state = NodeState.READY if ready else NodeState.FAILED
    return Node(node_id, "", state=state, model="demo", models=(ModelReport("demo", state=state),), memory_bytes=1)


@pytest.mark.parametrize(
    ("running", "waiting", "consequence"),
    [
        (0, 0, "node-1 runs no generation; new ones go to other nodes."),
        (1, 0, "node-1 runs 1 generation, which it finishes; new ones go to other nodes."),
        (3, 2, "node-1 runs 3 generations, and 2 wait there, which it finishes; new ones go to other nodes."),
    ],
)
def test_the_question_names_what_runs(scene: Any, running: int, waiting: int, consequence: str) -> None:
    status = scene.cluster(scene.node("node-0"), scene.node("node-1", running, waiting=waiting))
    asked = proposed(DRAIN, "node-1", status)
    assert asked.consequence == consequence
    assert not asked.typed
    assert asked.question.startswith("Drain node-1? (y/n)")
    assert [asked.agreed(answer) for answer in ("y", " YES ", "n", "", "node-1")] == [True, True, False, False, False]


def test_the_last_ready_node_asks_for_its_id(scene: Any) -> None:
    status = scene.cluster(scene.node("node-0", state=NodeState.FAILED), scene.node("node-1", 3))
    asked = proposed(DRAIN, "node-1", status)
    assert asked.typed
    assert "node-1 is the last ready node of 'demo'" in asked.question
    assert "Type node-1 to drain it" in asked.question
    assert [asked.agreed(answer) for answer in ("node-1", " node-1 ", "y", "node-0", "")] == [True, True, False, False, False]


def test_what_would_change_nothing_is_refused(scene: Any) -> None:
    status = scene.cluster(scene.node("node-0"), scene.node("node-1", drained=True))
    assert refused(DRAIN, "node-1", status) == "node-1 drains already"
    assert refused(UNDRAIN, "node-0", status) == "node-0 does not drain"
    assert refused(DRAIN, "", status) == "choose a row of a node to drain it"
    assert "is not a member" in refused(DRAIN, "node-9", status)
    assert proposed(UNDRAIN, "node-1", status).consequence == "node-1 takes work again."


def test_without_an_orchestrator_nothing_can_be_drained(scene: Any) -> None:
    status = scene.cluster(scene.node("node-0"), errors={"orchestrator": "UNAVAILABLE"})
    assert refused(DRAIN, "node-0", status) == "the orchestrator does not answer: drain needs it"
    assert refused(DRAIN, "node-0", None) == "the orchestrator does not answer: drain needs it"


def test_a_watch_that_is_read_only_proposes_nothing(scene: Any) -> None:
    assert refused(DRAIN, "node-0", scene.cluster(scene.node("node-0")), read_only=True) == READ_ONLY


async def test_a_watch_that_is_read_only_performs_nothing_whoever_calls(orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0"), member("node-1")]
    operator = Operator(orchestrator.address, PLAIN, read_only=True)
    for act, typed in ((DRAIN, False), (DRAIN, True), (UNDRAIN, False)):
        assert await operator.perform(Proposal(act, "node-0", "", typed), "node-0" if typed else "y") == READ_ONLY
    assert orchestrator.drained == []


async def test_a_yes_drains_and_anything_else_does_not(orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0"), member("node-1")]
    operator = Operator(orchestrator.address, PLAIN, read_only=False)
    for answer in ("n", "", "node-1"):
        assert await operator.perform(Proposal(DRAIN, "node-1", ""), answer) == "nothing was changed"
    assert orchestrator.drained == []
    assert await operator.perform(Proposal(DRAIN, "node-1", ""), "y") == "node-1 is draining"
    assert await operator.perform(Proposal(UNDRAIN, "node-1", ""), "y") == "node-1 takes work again"
    assert orchestrator.drained == [("node-1", True), ("node-1", False)]


async def test_a_node_that_became_the_last_one_meanwhile_is_asked_about_again(orchestrator: Any) -> None:
    orchestrator.nodes = [member("node-0", ready=False), member("node-1")]
    operator = Operator(orchestrator.address, PLAIN, read_only=False)
    again = await operator.perform(Proposal(DRAIN, "node-1", "it runs nothing"), "y")
    assert isinstance(again, Proposal)
    assert again.typed
    assert orchestrator.drained == []
    assert await operator.perform(again, "y") == "nothing was changed"
    assert await operator.perform(again, "node-1") == "node-1 is draining"


async def test_a_failure_is_one_line_with_its_reason(orchestrator: Any) -> None:
    operator = Operator(orchestrator.address, PLAIN, read_only=False)
    assert await operator.perform(Proposal(UNDRAIN, "node-9", ""), "y") == "undrain failed, NOT_FOUND: no node node-9"
    nobody = Operator(f"127.0.0.1:{free_ports(1)[0]}", PLAIN, read_only=False)
    told = await nobody.perform(Proposal(DRAIN, "node-1", ""), "y")
    assert isinstance(told, str)
    assert told.startswith("drain failed, UNAVAILABLE: ")
    assert "\n" not in told
