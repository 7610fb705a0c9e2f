"""Placement on nodes that serve several models: what fits, what stays, and what lacks room."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.cluster import Deployment, ModelNeed, ModelReport, Node, NodeState
from ryzanstein.orchestrator.placing.packing import NodeRoom
from ryzanstein.orchestrator.placing.placement import MAX_SHORTAGES, Reports, place, place_in_steps

GIB = 2**30
NAMES = "uvwxyz"
READY, FAILED = NodeState.READY, NodeState.FAILED


def plural(node_id, *models, room=10, **more):
    return Node(node_id, "h:1", "1", state=READY, models=models, memory_bytes=room, **more)


def served(model, size, **more):
    return ModelReport(model, f"/{model}", state=more.pop("state", READY), memory_bytes=size, **more)


def deployment(model, replicas=1, **more):
    return Deployment(model, f"/{model}", replicas, **more)


def needs(nodes, **sizes):
    return {node.node_id: {f"/{model}": ModelNeed(f"/{model}", size) for model, size in sizes.items()} for node in nodes}


def names(placement):
    return {node_id: [d.model for d in deployments] for node_id, deployments in placement.assigned.items()}


def test_a_node_takes_as_many_deployments_as_fit():
    nodes = [plural("a")]
    wanted = [deployment("x"), deployment("y"), deployment("z")]
    placement = place(wanted, nodes, Reports(needs=needs(nodes, x=4, y=5, z=2)))
    assert names(placement) == {"a": ["x", "y"]}, "the larger ones first"
    (shortage,) = placement.shortages(wanted[2])
    assert (shortage.node_id, shortage.missing_bytes) == ("a", 1)
    assert placement.short(wanted[2]) == 1
    assert placement.shortages(wanted[0]) == []


def test_models_that_are_unloaded_while_idle_share_the_room_of_the_largest():
    nodes = [plural("a")]
    idle = [deployment(model, idle_unload_s=60) for model in "xyz"]
    placement = place([*idle, deployment("w")], nodes, Reports(needs=needs(nodes, x=5, y=5, z=4, w=5)))
    assert names(placement) == {"a": ["w", "x", "y", "z"]}
    over = place([*idle, deployment("w")], nodes, Reports(needs=needs(nodes, x=5, y=5, z=4, w=6)))
    assert over.short(idle[0]) + over.short(deployment("w")) + over.short(idle[1]) > 0


def test_deployments_are_spread_over_the_memory_of_the_nodes():
    nodes = [plural("a"), plural("b")]
    placement = place([deployment("x"), deployment("y")], nodes, Reports(needs=needs(nodes, x=4, y=4)))
    assert sorted(map(len, names(placement).values())) == [1, 1]


def test_a_node_where_nothing_gives_way_is_preferred_but_what_it_was_started_with_gives_way():
    full = plural("a", served("own", 8, started_with=True))
    free = plural("b", served("own", 4, started_with=True))
    for nodes, chosen in (([full, free], "b"), ([full], "a")):
        placement = place([deployment("x")], nodes, Reports(needs=needs(nodes, x=5)))
        assert names(placement) == {chosen: ["x"]}


def test_what_is_assigned_stays_when_a_larger_deployment_comes():
    nodes = [plural("a", room=10)]
    measured = needs(nodes, small=4, large=8)
    before = place([deployment("small")], nodes, Reports(needs=measured)).assigned
    placement = place([deployment("small"), deployment("large")], nodes, Reports(needs=measured, before=before))
    assert names(placement) == {"a": ["small"]}, "although the node does not report it yet"


def test_a_drained_and_a_failed_node_are_given_up():
    bad, good = plural("a", served("x", 4, state=FAILED, revision=1)), plural("b")
    nodes = [bad, good]
    reports = Reports({("a", "x")}, needs(nodes, x=4), {"a": (deployment("x", revision=1),)})
    assert names(place([deployment("x", revision=1)], nodes, reports)) == {"b": ["x"]}
    drained = [plural("a", served("x", 4), drain_requested=True), good]
    placement = place([deployment("x", 2)], drained, Reports(needs=needs(nodes, x=4)))
    assert names(placement) == {"b": ["x"]}
    assert [(each.node_id, each.reason) for each in placement.shortages(deployment("x", 2))] == [("a", "draining")]


def test_what_is_not_measured_or_refused_is_no_candidate_and_the_status_says_so():
    nodes = [plural("a"), plural("b", room=5 * GIB), plural("c", room=2 * GIB)]
    measured = {"b": {"/x": ModelNeed("/x", error="no config.json")}, "c": {"/x": ModelNeed("/x", 3 * GIB)}}
    placement = place([deployment("x")], nodes, Reports(needs=measured))
    assert names(placement) == {}
    assert [each.reason for each in placement.shortages(deployment("x"))] == [
        "not measured yet",
        "no config.json",
        "needs 3.0 GiB, 2.0 GiB of 2.0 GiB are free",
    ]


def test_a_deployment_without_a_number_is_on_every_node_that_has_room_after_the_counted_ones():
    nodes = [plural("a"), plural("b"), plural("c", drain_requested=True)]
    measured = needs(nodes, counted=7, small=2, big=5)
    placement = place([deployment("counted"), deployment("small", 0), deployment("big", 0)], nodes, Reports(needs=measured))
    has = names(placement)
    (busy,) = [node_id for node_id, models in has.items() if "counted" in models]
    other = "b" if busy == "a" else "a"
    assert has == {busy: ["counted", "small"], other: ["big", "small"]}
    assert placement.short(deployment("big", 0)) == 1


def test_older_and_newer_nodes_share_the_replicas():
    nodes = [plural("a"), Node("old", "h:1", "1", state=READY), Node("older", "h:1", "1", state=READY)]
    placement = place([deployment("x", 2), deployment("y", 2)], nodes, Reports(needs=needs(nodes[:1], x=4, y=4)))
    has = names(placement)
    assert has["a"] == ["x", "y"]
    assert sorted(has["old"] + has["older"]) == ["x", "y"]


def test_shortages_are_bounded():
    nodes = [plural(f"n{i:03}") for i in range(200)]
    assert len(place([deployment("x")], nodes).shortages(deployment("x"))) == MAX_SHORTAGES


sizes = st.integers(1, 12)
started = st.booleans()
reports = st.lists(
    st.builds(served, st.sampled_from([*NAMES, "own"]), sizes, started_with=started), max_size=3, unique_by=lambda r: r.model
)


@st.composite
def clusters(draw):
    nodes = [
        plural(name, *draw(reports), room=draw(st.integers(1, 30)), drain_requested=draw(st.booleans()))
        for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True))
    ]
    # A node holds no more than it has room for.
    nodes = [
        node if sum(r.memory_bytes for r in node.models) <= node.memory_bytes else replace(node, models=()) for node in nodes
    ]
    wanted = [
        deployment(model, draw(st.integers(0, 4)), idle_unload_s=draw(st.sampled_from([0.0, 60.0])))
        for model in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]
    measured = needs(nodes, **{model: draw(sizes) for model in NAMES})
    return nodes, wanted, measured


def size_on(node, each, measured):
    report = node.report(each.model)
    return report.memory_bytes if report is not None else measured[node.node_id][each.path].bytes


def taken(node, deployments, measured):
    stay = sum(size_on(node, d, measured) for d in deployments if not d.idle_unload_s)
    return stay + max((size_on(node, d, measured) for d in deployments if d.idle_unload_s), default=0)


@given(clusters(), st.randoms())
def test_no_node_gets_more_than_fits_and_the_order_does_not_matter(cluster, random):
    nodes, wanted, measured = cluster
    placement = place(wanted, nodes, Reports(needs=measured))
    by_id = {node.node_id: node for node in nodes}
    for node_id, deployments in placement.assigned.items():
        assert not by_id[node_id].drain_requested
        assert len({d.model for d in deployments}) == len(deployments)
        assert taken(by_id[node_id], deployments, measured) <= by_id[node_id].memory_bytes
    for each in wanted:
        got = sum(each in deployments for deployments in placement.assigned.values())
        assert not each.replicas or got <= each.replicas
    random.shuffle(nodes)
    random.shuffle(wanted)
    assert place(wanted, nodes, Reports(needs=measured)).assigned == placement.assigned


@given(clusters())
def test_no_deployment_is_short_while_it_fits_somewhere(cluster):
    nodes, wanted, measured = cluster
    placement = place(wanted, nodes, Reports(needs=measured))
    for each in wanted:
        if placement.short(each):
            for node in nodes:
                has = placement.assigned.get(node.node_id, ())
                fits = taken(node, [*has, each], measured) <= node.memory_bytes
                assert node.drain_requested or each in has or not fits


@given(clusters(), clusters())
def test_what_is_assigned_stays_when_nodes_and_deployments_are_added(cluster, more):
    nodes, wanted, measured = cluster
    before = place(wanted, nodes, Reports(needs=measured)).assigned
    names_now = {d.model for d in wanted}
    wanted = [*wanted, *(d for d in more[1] if d.model not in names_now)]
    ids = {node.node_id for node in nodes}
    added = [node for node in more[0] if node.node_id not in ids]
    after = place(wanted, [*nodes, *added], Reports(needs={**more[2], **measured}, before=before)).assigned
    for node_id, deployments in before.items():
        assert {d.model for d in deployments} <= {d.model for d in after.get(node_id, ())}


def one_after_the_other(wanted, nodes, measured):
    """The models of each node that has none before, by a search of all nodes for each replica."""
    placed = {node.node_id: [] for node in nodes}

    def size(node, each):
        return measured[node.node_id][each.path].bytes

    def fraction(node, each):
        return taken(node, [*placed[node.node_id], each], measured) / node.memory_bytes

    usable = [node for node in nodes if not node.drain_requested]

    def options(each):
        return [node for node in usable if each not in placed[node.node_id] and fraction(node, each) <= 1]

    for each in sorted(wanted, key=lambda d: (-max((size(node, d) for node in usable), default=0), d.model)):
        for _ in range(each.replicas):
            zones = Counter(node.zone for node in usable if each in placed[node.node_id])
            hosts = Counter((node.zone, node.machine) for node in usable if each in placed[node.node_id])
            if found := options(each):
                weights = {node: blake2b(f"{node.node_id}\0{each.model}".encode(), digest_size=8).digest() for node in found}
                best = min(
                    found,
                    key=lambda n: (zones[n.zone], hosts[n.zone, n.machine], fraction(n, each), weights[n]),
                )
                placed[best.node_id].append(each)
    return {node_id: sorted(d.model for d in those) for node_id, those in placed.items() if those}


places = st.tuples(st.sampled_from(["", "z1", "z2"]), st.sampled_from(["", "h1", "h2"]))


@given(clusters(), st.lists(places, min_size=8, max_size=8), st.sampled_from([1, 7, 8192]))
def test_replicas_are_placed_as_by_a_search_of_all_nodes_for_each_whatever_a_step_is(cluster, where, step):
    nodes, wanted, measured = cluster
    wanted = [each for each in wanted if each.replicas]
    empty = [replace(node, models=(), zone=zone, host=host) for node, (zone, host) in zip(nodes, where, strict=False)]
    with patch("ryzanstein.orchestrator.placing.placement.STEP", step):
        assert names(place(wanted, empty, Reports(needs=measured))) == one_after_the_other(wanted, empty, measured)


def test_a_need_beyond_all_memory_fits_nowhere():
    nodes = [plural("a")]
    assert place([deployment("x")], nodes, Reports(needs=needs(nodes, x=2**64 - 1))).short(deployment("x")) == 1


@pytest.mark.parametrize("replicas", [3, 0], ids=["three replicas", "on every node"])
def test_a_placement_in_steps_looks_at_few_nodes_in_each(replicas):
    nodes = [plural(f"n{i}", room=1000) for i in range(50)]
    wanted = [deployment(f"m{i}", replicas) for i in range(40)]
    measured = needs(nodes, **{each.model: 3 for each in wanted})
    looks, spent = 0, []
    fraction = NodeRoom.fraction

    def counting(self, *what):
        nonlocal looks
        looks += 1
        return fraction(self, *what)

    with patch("ryzanstein.orchestrator.placing.placement.STEP", 100), patch.object(NodeRoom, "fraction", counting):
        for _ in place_in_steps(wanted, nodes, Reports(needs=measured)):
            spent.append(looks)
            looks = 0
    assert sum(spent) == 50 * 40
    assert max(spent) <= 150


@pytest.mark.parametrize("settled", [False, True], ids=["first placement", "nothing changes"])
def test_a_thousand_nodes_and_twenty_deployments_are_placed_quickly(settled):
    nodes = [plural(f"n{i}", room=100) for i in range(1000)]
    wanted = [deployment(f"m{i}", 0 if i % 5 == 0 else 50) for i in range(20)]
    measured = needs(nodes, **{f"m{i}": 3 + i for i in range(20)})
    before = place(wanted, nodes, Reports(needs=measured)).assigned if settled else {}
    spent = []
    for _ in range(5):
        began = time.process_time()
        place(wanted, nodes, Reports(needs=measured, before=before))
        spent.append(time.process_time() - began)
    assert min(spent) < 0.25, "0.05 s on two idle cores"
