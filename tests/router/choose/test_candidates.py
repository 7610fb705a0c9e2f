"""Filter, score, pick, under the policy of every model that has none of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ryzanstein.cluster import Load, NodeState
from ryzanstein.router.choose import Affinity, NodeView, ranked

STICKY = Affinity(b"session:s", True)
LOOSE = Affinity(b"prefix:p", False)
NODES = [NodeView(name, "m", NodeState.READY, Load(capacity=8)) for name in ("a", "b", "c")]


@pytest.fixture
def choose(make_desk: Any) -> Callable[..., list[str]]:
    chooser = make_desk(queue_bound=4).chooser

    def choose(
        nodes: list[NodeView], affinity: Affinity = STICKY, excluded: tuple[str, ...] = (), model: str = "m"
    ) -> list[str]:
        return chooser.candidates(nodes, model, affinity, excluded)

    return choose


def changed(node_id: str, **values: object) -> list[NodeView]:
    return [replace(node, **values) if node.node_id == node_id else node for node in NODES]  # type: ignore[arg-type]


def test_candidates_are_the_rendezvous_order(choose: Any) -> None:
    assert choose(NODES) == ranked(STICKY.key, ["a", "b", "c"])


@pytest.mark.parametrize(
    "values",
    [
        {"model": "other"},
        {"state": NodeState.STARTING},
        {"state": NodeState.DRAINING},
        {"state": NodeState.RECOVERING},
        {"state": NodeState.FAILED},
        {"admits": False},
        {"suspected": True},
        {"drain_requested": True},
        {"linked": False},
    ],
)
def test_a_node_that_cannot_take_it_is_no_candidate_and_the_order_of_the_others_stays(
    choose: Any, values: dict[str, object]
) -> None:
    order = ranked(STICKY.key, ["a", "b", "c"])
    assert choose(changed(order[0], **values)) == order[1:]


def test_an_excluded_node_is_no_candidate(choose: Any) -> None:
    order = choose(NODES)
    assert choose(NODES, excluded=(order[0],)) == order[1:]


def test_without_a_usable_node_there_is_no_candidate(choose: Any) -> None:
    assert choose([]) == []
    assert choose(NODES, model="unknown") == []


def test_a_session_stays_while_its_nodes_queue_is_within_the_bound_and_leaves_above_it(choose: Any) -> None:
    order = choose(NODES)
    assert choose(changed(order[0], load=Load(running=8, waiting=4, capacity=8))) == order
    assert choose(changed(order[0], load=Load(running=8, waiting=5, capacity=8)))[0] == order[1]


def test_when_every_queue_is_over_the_bound_the_least_loaded_node_comes_first(choose: Any) -> None:
    waiting = {"a": 30, "b": 10, "c": 20}
    nodes = [replace(node, load=Load(running=8, waiting=waiting[node.node_id], capacity=8)) for node in NODES]
    assert choose(nodes) == ["b", "c", "a"]


def test_own_attempts_count_before_a_beat_tells_of_them(choose: Any) -> None:
    order = choose(NODES)
    assert choose(changed(order[0], inflight=8 + 5))[0] == order[1]


def test_equal_prompts_are_spread_when_their_node_has_more_than_its_share(choose: Any) -> None:
    inflight = dict.fromkeys("abc", 0)
    for _ in range(90):
        nodes = [replace(node, inflight=inflight[node.node_id]) for node in NODES]
        inflight[choose(nodes, LOOSE)[0]] += 1
    assert max(inflight.values()) <= 1.25 * 30 + 1
    assert min(inflight.values()) > 0


def test_a_lone_prompt_goes_to_its_own_node(choose: Any) -> None:
    assert choose(NODES, LOOSE) == ranked(LOOSE.key, ["a", "b", "c"])
