"""Which models would have no node after a drain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.cli.rollout.last_node import last_node, last_node_at
from ryzanstein.cluster import Beat, ModelReport, Node, NodeState

READY = NodeState.READY
FAILS = "after it drains, every request for"


def member(node_id: str, *models: str, state: NodeState = READY, drained: bool = False) -> Node:
    reports = tuple(ModelReport(model, state=state) for model in models)
    first = models[0] if models else ""
    return Node(node_id, "", state=READY, model=first, models=reports, memory_bytes=1, drain_requested=drained)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([member("b", "demo", "second")], "None"),
        ([member("b", "demo")], f"a is the last ready node of 'second': {FAILS} this model fails"),
        ([], f"a is the last ready node of 'demo' and 'second': {FAILS} these models fails"),
        ([member("b", "second", drained=True), Node("c", "", state=READY, model="demo")], "'second': "),
        ([member("b", "second", state=NodeState.FAILED), member("c", "demo")], "'second': "),
        ([replace(member("b"), models=(ModelReport("second", asleep=True),)), member("c", "demo")], "None"),
        ([Node("b", "", state=READY, model="second"), member("c", "demo")], "None"),
    ],
)
async def test_every_model_of_the_node_counts(orchestrator: Any, others: list[Node], message: str) -> None:
    orchestrator.nodes = [member("a", "demo", "second"), *others]
    assert message in str(await last_node(orchestrator.address, "a"))


async def test_a_stranger_and_a_node_without_models_may_drain(orchestrator: Any) -> None:
    orchestrator.nodes = [member("a")]
    assert await last_node(orchestrator.address, "a") is None
    assert await last_node(orchestrator.address, "b") is None


async def test_the_node_at_an_address_is_known_by_what_it_says(orchestrator: Any) -> None:
    node = orchestrator.add(member("a", "demo", "second"), Beat(state=READY, model="demo"))
    orchestrator.add(member("b", "demo"))
    assert str(await last_node_at(orchestrator.address, node.address)).startswith("a is the last ready node of 'second': ")
