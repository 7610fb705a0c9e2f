from __future__ import annotations

from dataclasses import replace

import pytest

from ryzanstein.cluster import Beat, Load, ModelReport, NodeReport, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.state.changes import NodeChanged, NodeLeft
from ryzanstein.orchestrator.state.members.registry import Registry


@pytest.fixture
def published():
    return []


@pytest.fixture
def registry(clock, published):
    return Registry(published.append, lease_s=3.0, max_nodes=3, monotonic=clock, wall=clock)


def test_a_join_is_published_with_its_times(registry, published, make_node, clock):
    registry.join(make_node("a"))
    (change,) = published
    assert change == NodeChanged(registry.nodes()[0])
    assert (change.node.join_time, change.node.beat_time) == (clock.now, clock.now)
    assert change.node.state is NodeState.STARTING


def test_a_silent_node_is_removed_when_its_lease_runs_out_and_not_before(registry, published, make_node, clock):
    registry.join(make_node("a"))
    clock.now += 2.999
    assert registry.expire() == []
    clock.now += 0.002
    assert registry.expire() == ["a"]
    assert published[-1] == NodeLeft("a")
    assert registry.nodes() == ()


def test_a_beat_renews_the_lease(registry, make_node, clock):
    lease = registry.join(make_node("a"))
    registry.join(make_node("b"))
    for sequence in range(5):
        clock.now += 1
        registry.beat("a", lease, NodeReport(Beat(sequence=sequence, state=NodeState.READY)))
    assert registry.expire() == ["b"]
    assert [node.node_id for node in registry.nodes()] == ["a"]


def test_a_beat_after_the_lease_ran_out_is_not_found_even_before_expire_ran(registry, published, make_node, clock):
    lease = registry.join(make_node("a"))
    clock.now += 10
    with pytest.raises(RyzansteinError) as failure:
        registry.beat("a", lease, NodeReport(Beat()))
    assert failure.value.code is Code.NOT_FOUND
    assert published[-1] == NodeLeft("a")


@pytest.mark.parametrize(("node_id", "lease"), [("a", "wrong"), ("b", None)])
def test_a_beat_needs_the_lease_of_its_node(registry, make_node, node_id, lease):
    granted = registry.join(make_node("a"))
    with pytest.raises(RyzansteinError) as failure:
        registry.beat(node_id, lease or granted, NodeReport(Beat()))
    assert failure.value.code is Code.NOT_FOUND


def test_a_new_incarnation_replaces_the_old_one_and_voids_its_lease(registry, make_node, clock):
    old = registry.join(make_node("a", "1"))
    clock.now += 1
    new = registry.join(make_node("a", "2"))
    assert [node.incarnation for node in registry.nodes()] == ["2"]
    assert registry.nodes()[0].join_time == clock.now
    registry.beat("a", new, NodeReport(Beat()))
    with pytest.raises(RyzansteinError):
        registry.beat("a", old, NodeReport(Beat()))


def test_a_replaced_process_cannot_take_its_name_back_while_its_successor_lives(registry, make_node, clock):
    registry.join(make_node("a", "1"))
    registry.join(make_node("a", "2"))
    with pytest.raises(RyzansteinError) as failure:
        registry.join(make_node("a", "1"))
    assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "NODE_REPLACED")
    clock.now += 10
    registry.expire()
    registry.join(make_node("a", "1"))
    assert registry.nodes()[0].incarnation == "1"


def test_the_same_incarnation_renews_its_membership_and_keeps_its_join_time(registry, make_node, clock):
    registry.join(make_node("a"))
    joined = clock.now
    clock.now += 1
    registry.join(make_node("a"))
    assert (registry.nodes()[0].join_time, registry.nodes()[0].beat_time) == (joined, clock.now)


def test_a_renewed_node_that_says_nothing_is_as_it_was(registry, make_node):
    lease = registry.join(make_node("a"))
    registry.beat("a", lease, NodeReport(Beat(1, NodeState.READY, "m", 512, Load(running=1))))
    registry.join(make_node("a", state=NodeState.UNSPECIFIED))
    (node,) = registry.nodes()
    assert (node.state, node.model, node.context_length, node.load.running) == (NodeState.READY, "m", 512, 1)


def test_a_full_cluster_refuses_one_more_but_renews_its_members(registry, make_node):
    for name in "abc":
        registry.join(make_node(name))
    with pytest.raises(RyzansteinError) as failure:
        registry.join(make_node("d"))
    assert (failure.value.code, failure.value.metadata["bound"]) == (Code.RESOURCE_EXHAUSTED, "3")
    registry.join(make_node("a", "2"))
    assert len(registry) == 3


def test_a_drain_request_lasts_for_one_incarnation(registry, make_node, clock):
    registry.join(make_node("a", "1"))
    assert registry.drain("a").drain_requested
    registry.join(make_node("a", "1"))
    assert registry.nodes()[0].drain_requested, "renewed"
    clock.now += 10
    registry.expire()
    registry.join(make_node("a", "1"))
    assert registry.nodes()[0].drain_requested, "came back after its lease ran out"
    registry.join(make_node("a", "2"))
    assert not registry.nodes()[0].drain_requested, "started again"
    assert registry.drains == {}


def test_a_node_that_leaves_takes_its_drain_request_with_it(registry, published, make_node):
    lease = registry.join(make_node("a"))
    registry.drain("a")
    registry.leave("a", lease)
    assert (registry.drains, published[-1]) == ({}, NodeLeft("a"))


def test_a_drain_request_that_is_withdrawn_is_reported_once_and_kept_by_nobody(registry, published, make_node):
    registry.join(make_node("a"))
    registry.drain("a")
    assert not registry.undrain("a").drain_requested
    before = len(published)
    assert not registry.undrain("a").drain_requested
    assert (registry.drains, len(published)) == ({}, before)
    registry.join(make_node("a"))
    assert not registry.nodes()[0].drain_requested


def test_undraining_a_stranger_is_not_found(registry):
    with pytest.raises(RyzansteinError) as failure:
        registry.undrain("nobody")
    assert failure.value.code is Code.NOT_FOUND


def test_leaving_needs_the_lease(registry, make_node):
    registry.join(make_node("a"))
    with pytest.raises(RyzansteinError) as failure:
        registry.leave("a", "wrong")
    assert failure.value.code is Code.NOT_FOUND
    assert registry.incarnation("a") == "1"


def test_draining_a_stranger_is_not_found(registry):
    with pytest.raises(RyzansteinError) as failure:
        registry.drain("nobody")
    assert failure.value.code is Code.NOT_FOUND


def test_drain_requests_are_bounded_by_the_number_of_nodes(registry, make_node, clock):
    for number in range(9):
        registry.join(make_node(f"n{number}"))
        registry.drain(f"n{number}")
        clock.now += 10
        registry.expire()
    assert list(registry.drains) == ["n6", "n7", "n8"]


def test_a_state_is_published_at_once_and_a_load_only_when_asked(registry, published, make_node):
    lease = registry.join(make_node("a"))
    published.clear()
    registry.beat("a", lease, NodeReport(Beat(1, NodeState.READY, "m")))
    assert [change.load_only for change in published] == [False]
    registry.beat("a", lease, NodeReport(Beat(2, NodeState.READY, "m", load=Load(running=1))))
    registry.beat("a", lease, NodeReport(Beat(3, NodeState.READY, "m", load=Load(running=2))))
    assert len(published) == 1
    assert registry.publish_loads(10) == 1
    assert (published[-1].load_only, published[-1].node.load.running) == (True, 2)
    assert registry.publish_loads(10) == 0


def test_an_unchanged_load_is_not_published(registry, make_node):
    lease = registry.join(make_node("a"))
    registry.beat("a", lease, NodeReport(Beat(1, NodeState.STARTING)))
    assert registry.publish_loads(10) == 0


def test_loads_are_published_longest_waiting_first(registry, published, make_node):
    leases = {name: registry.join(make_node(name)) for name in "abc"}
    for name in "bca":
        registry.beat(name, leases[name], NodeReport(Beat(1, NodeState.STARTING, load=Load(running=1))))
    published.clear()
    registry.publish_loads(2)
    assert [change.node.node_id for change in published] == ["b", "c"]


def test_a_load_is_not_published_after_its_node_left(registry, published, make_node):
    lease = registry.join(make_node("a"))
    registry.beat("a", lease, NodeReport(Beat(1, NodeState.STARTING, load=Load(running=1))))
    registry.leave("a", lease)
    assert registry.publish_loads(10) == 0


def test_a_late_beat_renews_but_says_nothing_new(registry, make_node):
    lease = registry.join(make_node("a"))
    registry.beat("a", lease, NodeReport(Beat(7, NodeState.READY, "m")))
    node = registry.beat("a", lease, NodeReport(Beat(6, NodeState.STARTING, "")))
    assert (node.state, node.model) == (NodeState.READY, "m")


def test_a_process_that_stood_still_forgives_every_lease(registry, make_node, clock):
    registry.join(make_node("a"))
    registry.join(make_node("b"))
    clock.now += 60
    registry.forgive()
    assert registry.expire() == []
    clock.now += 3.1
    assert sorted(registry.expire()) == ["a", "b"]


def several(*models, **more):
    return NodeReport(Beat(1, NodeState.READY, "m"), models, 100, **more)


def test_loads_and_memory_of_every_model_are_published_only_when_asked(registry, published, make_node):
    lease = registry.join(make_node("a"))
    first, second = ModelReport("m", "/m", 1, NodeState.READY), ModelReport("n", "/n", 1, NodeState.READY)
    registry.beat("a", lease, several(first, second))
    published.clear()
    registry.beat("a", lease, several(first, replace(second, load=Load(running=1))))
    registry.beat("a", lease, several(first, replace(second, load=Load(running=2), memory_bytes=7)))
    assert published == []
    assert registry.publish_loads(10) == 1
    assert (published[-1].load_only, published[-1].node.models[1].load.running) == (True, 2)
    registry.beat("a", lease, several(first, replace(second, revision=2)))
    assert [change.load_only for change in published] == [True, False]


def test_a_renewed_node_that_says_nothing_of_its_models_keeps_them(registry, make_node):
    lease = registry.join(make_node("a"))
    model = ModelReport("m", "/m", 1, NodeState.READY)
    registry.beat("a", lease, several(model))
    registry.join(make_node("a"))
    assert (registry.nodes()[0].models, registry.nodes()[0].memory_bytes) == ((model,), 100)
    registry.join(make_node("a", "2"))
    assert (registry.nodes()[0].models, registry.nodes()[0].memory_bytes) == ((), 0)
