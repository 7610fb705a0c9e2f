"""Which nodes may be changing, by what they were told and have reported since."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.cluster import Deployment, Load, ModelReport, Node, NodeState, RolloutLimits
from ryzanstein.orchestrator.placing.places import WavePlaces
from ryzanstein.orchestrator.placing.rolling import RollingChanges
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds

READY, RECOVERING = NodeState.READY, NodeState.RECOVERING


def node(
    name: str, beat: float = 0.0, revision: int = 1, *, state: NodeState = READY, capacity: int = 0, running: int = 0
) -> Node:
    report = ModelReport("m", "/m", revision, state, load=Load(running=running, capacity=capacity), memory_bytes=60)
    return Node(name, f"{name}:1", "1", beat_time=beat, models=(report,), memory_bytes=100)


def looked(places: WavePlaces, revision: int, *members: Node, others: tuple[Node, ...] = (), now: float = 0.0) -> set[str]:
    """Returns who has a place after a look. Members show nothing but their revision; `others` should not have the model."""
    places.look(
        Deployment("m", "/m", revision=revision),
        members,
        {each.node_id: each for each in (*members, *others)},
        waiting={each.node_id for each in members if each.models[0].revision != revision},
        shows=lambda _: None,
        now=now,
    )
    return set(places.node_ids)


def turns(rolling: RollingChanges, wanted: Deployment, *members: Node, others: tuple[Node, ...] = ()) -> set[str]:
    """Returns the members that should change to a revision, or have it."""
    rolling.update({each.node_id: (wanted,) for each in members}, [*members, *others], (), {})
    return {each.node_id for each in members if rolling.instructed(each, wanted) == wanted}


def test_a_node_has_its_place_until_it_changed() -> None:
    places = WavePlaces()
    places.tell("a", 2, beside=False)
    assert [looked(places, 2, node("a", beat)) for beat in range(9)] == [{"a"}] * 9
    assert looked(places, 2, node("a", 9, revision=2)) == set()


def test_a_node_that_is_told_otherwise_keeps_its_place_until_it_has_heard_that() -> None:
    places = WavePlaces()
    places.tell("a", 2, beside=False)
    assert [looked(places, 3, node("a", beat)) for beat in (0, 0, 1, 1, 2)] == [{"a"}] * 4 + [set()]


def test_a_node_that_is_told_anew_must_hear_anew_that_it_should_not() -> None:
    places = WavePlaces()
    places.tell("a", 2, beside=False)
    assert looked(places, 3, node("a", 0)) == looked(places, 3, node("a", 1)) == {"a"}
    places.tell("a", 3, beside=False)
    assert [looked(places, 4, node("a", beat)) for beat in (1, 2, 3)] == [{"a"}, {"a"}, set()]


def test_a_node_that_should_change_again_after_all_must_hear_anew_that_it_should_not() -> None:
    places = WavePlaces()
    places.tell("a", 2, beside=False)
    assert [looked(places, 2, others=(node("a", beat),)) for beat in (0, 1)] == [{"a"}, {"a"}]
    assert looked(places, 2, node("a", 1)) == {"a"}
    assert [looked(places, 2, others=(node("a", beat),)) for beat in (1, 2, 3)] == [{"a"}, {"a"}, set()]


def test_a_node_that_has_what_it_was_told_last_has_no_place_in_the_next_wave() -> None:
    places = WavePlaces()
    places.tell("a", 2, beside=False)
    assert looked(places, 3, node("a", 0, revision=2)) == set()
    places.tell("a", 3, beside=False)
    assert looked(places, 4, node("a", 0, revision=2)) == {"a"}, "it may be about to begin with 3"


def test_a_node_that_is_cut_off_keeps_its_place_for_a_minute_and_one_that_left_does_not() -> None:
    places = WavePlaces()
    for name in "ab":
        places.tell(name, 2, beside=False)
    assert [looked(places, 2, now=now) for now in (0.0, 59.0)] == [{"a", "b"}] * 2
    places.leave("a")
    assert looked(places, 2, node("b"), now=60.0) == {"b"}
    assert [looked(places, 2, now=now) for now in (70.0, 129.0, 131.0)] == [{"b"}, {"b"}, set()]


def test_a_replica_that_is_ready_only_just_keeps_its_place_until_it_has_heard_that_it_drains() -> None:
    now = [0.0]
    rolling = RollingChanges(lambda: now[0], RolloutBounds(min_ready_s=3.0))
    new = Deployment("m", "/m", revision=2)
    a, b = node("a", revision=2), node("b")
    now[0] = 5.0
    assert turns(rolling, new, a, b) == {"a"}
    drained = [replace(a, beat_time=beat, drain_requested=True) for beat in (0.0, 1.0, 2.0)]
    assert [turns(rolling, new, b, others=(each,)) for each in drained[:2]] == [set(), set()]
    now[0] = 9.0
    assert turns(rolling, new, b, others=(drained[2],)) == {"b"}


def test_none_that_may_serve_changes_while_too_many_may_be_changing() -> None:
    """One was told to change, and another stopped serving: the newest revision takes neither, until the first has heard."""
    rolling = RollingChanges(lambda: 0.0, RolloutBounds(min_ready_s=0.0))
    assert turns(rolling, Deployment("m", "/m", revision=2), node("a"), node("b"), node("c")) == {"a"}
    newest, crashed = Deployment("m", "/m", revision=3), node("c", state=RECOVERING)
    assert [turns(rolling, newest, node("a", beat), node("b"), crashed) for beat in (0, 1, 2)] == [set(), set(), {"c"}]


def test_what_a_node_serves_that_may_be_changing_holds_nothing() -> None:
    rolling = RollingChanges(lambda: 0.0, RolloutBounds(min_ready_s=0.0))
    large, small, done = node("a", capacity=16), node("b", capacity=2), node("c", revision=3, capacity=16)
    assert turns(rolling, Deployment("m", "/m", revision=2), large, small, done) == {"a"}
    newest = Deployment("m", "/m", revision=3, rollout=RolloutLimits(max_unavailable=1.0))
    busy = node("c", revision=3, capacity=16, running=16)
    assert turns(rolling, newest, large, small, busy) == {"c"}, "a cannot be spared, and b only if a serves"
    heard = [turns(rolling, newest, replace(large, beat_time=beat), small, busy) for beat in (1.0, 2.0)]
    assert heard == [{"c"}, {"b", "c"}]
