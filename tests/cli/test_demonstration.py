"""What the demo judges, from what it saw."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.cli.demo.demonstration import judge
from ryzanstein.cli.demo.fault import Failover
from ryzanstein.client import Answer

SMOOTH = Failover(
    killed_node="node-0",
    killed_after_tokens=25,
    continued_on="node-1",
    tokens=100,
    lost=0,
    repeated=0,
    identical=True,
    detected_to_rerouted_s=0.002,
    killed_to_next_token_s=0.05,
)
AFTERWARDS = [Answer(asked_at=0.0, accepted_by="node-1")]


def broken(failover: Failover, afterwards: list[Answer]) -> list[str]:
    return [promise.name for promise in judge(failover, afterwards) if not promise.kept]


def test_a_smooth_failover_breaks_no_promise() -> None:
    assert broken(SMOOTH, AFTERWARDS) == []


def test_every_broken_promise_is_named() -> None:
    cases = {
        "the answer continued on another node": replace(SMOOTH, continued_on="node-0"),
        "the answer is identical to the undisturbed one": replace(SMOOTH, identical=False),
        "tokens lost: 0": replace(SMOOTH, lost=1),
        "tokens repeated: 0": replace(SMOOTH, repeated=2),
        "the router counted the failover": replace(SMOOTH, detected_to_rerouted_s=None),
    }
    for name, failover in cases.items():
        assert broken(failover, AFTERWARDS) == [name]
    assert broken(SMOOTH, [Answer(asked_at=0.0, accepted_by="node-0")]) == ["the conversation continues on another node"]


def test_a_demo_in_which_nobody_was_killed_proves_nothing() -> None:
    assert "the answer continued on another node" in broken(replace(SMOOTH, killed_node=""), AFTERWARDS)
