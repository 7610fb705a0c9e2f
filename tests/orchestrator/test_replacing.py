"""How many replicas stay ready: drains, surges, bounds of a deployment, halts, and the way back."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.orchestrator.fleet import FAILED, READY, SIZES, STARTING, FakeNode, Fleet, Simulated, restored

from ryzanstein.cluster import Deployment, Load, ModelReport, Node, RolloutLimits
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.deploying.model_deployments import DeployOptions
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds

M, NEW = Deployment("m", "/m", 2, 1), Deployment("m", "/new", 2, 2)
NO_ROOM = 25
"""Of a node: enough for either revision, not for both."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "o.sqlite"


def simulated(names, deployment, *, room=NO_ROOM, bounds=None):
    """Nodes that serve a deployment, and a cluster that was told of it."""
    cluster = Simulated(deployment, bounds=bounds or RolloutBounds(min_ready_s=2.0))
    fleet = Fleet(cluster, *names, sizes=SIZES, room=room)
    for _ in range(4):
        fleet.advance(cluster.now)
    assert len(fleet.ready()) == (deployment.replicas or len(names))
    return cluster, fleet


def roll(cluster, fleet, new, *, until=300, load_s=5.0):
    """Replaces the deployment; returns the fewest and the most nodes that were ready meanwhile, and the names of all."""
    cluster.catalog.put(new)
    counts, touched = [], set(fleet.ready())
    while cluster.now < until:
        cluster.now += 1.0
        fleet.advance(cluster.now, load_s)
        counts.append(len(fleet.ready()))
        touched |= fleet.ready().keys()
    return min(counts), max(counts), touched


async def refused(call):
    with pytest.raises(RyzansteinError) as failure:
        await call
    return failure.value


async def test_a_drain_that_leaves_too_few_ready_replicas_is_refused_with_the_field_and_the_bound(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m", min_replicas=2))
        await control.drain("a")
        await control.undrain("a")
        fleet.load()
        await control.drain("a")
        error = await refused(control.drain("b"))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "BELOW_MIN_REPLICAS")
        assert error.metadata == {"model": "m", "field": "deployment.min_replicas", "bound": "2", "left": "1"}
        assert [each.field for each in error.violations] == ["deployment.min_replicas"]
        assert control.is_drained("b") is False
        await control.drain("a")  # again: it drains already
        await control.undrain("a")
        fleet.round()
        await control.drain("b")
        await control.drain("c", below_min=True)
        assert control.is_drained("c")


async def test_a_node_that_does_not_serve_the_model_drains_whatever_its_minimum_is(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m", min_replicas=2))
        fleet.load()
        fleet.nodes[0].models["m"] = replace(fleet.nodes[0].models["m"], state=STARTING)
        fleet.round()
        await control.drain("a")
        assert (await refused(control.drain("b"))).reason == "BELOW_MIN_REPLICAS"


async def test_a_node_that_was_told_to_change_does_not_count_as_ready(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", sizes=SIZES, room=NO_ROOM)
        await fleet.deploy(Deployment("m", "/m", min_replicas=1))
        fleet.load()
        await fleet.deploy(Deployment("m", "/new", min_replicas=1))
        assert fleet.revisions() == [2, 1, 1]
        await control.drain("b")
        assert (await refused(control.drain("c"))).reason == "BELOW_MIN_REPLICAS", "a still says that it serves"


@pytest.mark.parametrize(
    "bounds",
    [{"min_replicas": 2}, {"rollout": RolloutLimits(max_unavailable=0.0)}, {"max_replicas": 4, "min_replicas": 2}],
    ids=["min_replicas", "max_unavailable", "surge of two"],
)
def test_another_node_stands_in_where_none_may_be_away(bounds):
    cluster, fleet = simulated("abcde", replace(M, **bounds))
    before = fleet.ready().keys()
    least, most, touched = roll(cluster, fleet, replace(NEW, **bounds))
    assert least == 2
    assert most <= 2 + NEW.surge + bool(bounds.get("max_replicas"))
    assert set(fleet.ready().values()) == {2}
    assert len(fleet.ready()) == 2
    assert before < touched
    assert cluster.reconciler.status()[0].waits_for == ""


def test_a_single_replica_moves_to_a_node_that_is_ready_first():
    cluster, fleet = simulated("abc", replace(M, replicas=1))
    (before,) = fleet.ready()
    least, most, _ = roll(cluster, fleet, replace(NEW, replicas=1), until=60)
    assert (least, most) == (1, 2)
    assert list(fleet.ready().values()) == [2]
    assert before not in fleet.ready()


def test_a_single_replica_stays_where_both_revisions_fit():
    cluster, fleet = simulated("abc", replace(M, replicas=1), room=100)
    before = fleet.ready().keys()
    assert roll(cluster, fleet, replace(NEW, replicas=1), until=60) == (1, 1, before)
    assert fleet.ready() == dict.fromkeys(before, 2)


OUTAGE = RolloutLimits(allow_outage=True)


@pytest.mark.parametrize(
    "allowed", [{"replicas": 1, "rollout": OUTAGE}, {"replicas": 1, "outage_revision": 2}, {"replicas": 0}], ids=str
)
def test_an_only_replica_without_room_changes_in_place_where_that_is_allowed_or_every_node_should_have_it(allowed):
    cluster, fleet = simulated("a", replace(M, replicas=allowed["replicas"]))
    assert roll(cluster, fleet, replace(NEW, **allowed), until=60) == (0, 1, {"a"})
    assert fleet.ready() == {"a": 2}


def test_an_only_replica_waits_where_no_node_has_room_until_an_outage_is_allowed():
    """It was accepted: there was room then, or nobody had measured."""
    cluster, fleet = simulated("a", replace(M, replicas=1))
    before = fleet.ready()
    assert roll(cluster, fleet, replace(NEW, replicas=1), until=700)[0] == 1
    assert fleet.ready() == before
    assert "--allow-outage" in cluster.reconciler.status()[0].waits_for
    cluster.catalog.put(replace(NEW, replicas=1, outage_revision=2))
    cluster.reconciler.invalidate()
    for _ in range(20):
        cluster.now += 1.0
        fleet.advance(cluster.now, 5.0)
    assert fleet.ready() == dict.fromkeys(before, 2)


async def test_a_version_of_an_only_replica_for_which_no_node_has_room_is_refused_with_the_remedy(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", sizes=SIZES, room=15)
        await fleet.deploy(Deployment("m", "/m", 1))
        fleet.load()
        error = await refused(fleet.deploy(Deployment("m", "/m", 1), options=DeployOptions(reload=True)))
        assert error.reason == "CANNOT_BE_REPLACED"
        fleet.nodes[0].room = NO_ROOM
        fleet.round()
        error = await refused(fleet.deploy(Deployment("m", "/new", 1)))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CANNOT_BE_REPLACED")
        assert "it has one replica" in error.message
        assert "--allow-outage lets it be away while it loads" in error.message
        assert (await fleet.deploy(Deployment("m", "/new", 1, rollout=OUTAGE))).revision == 2
        for _ in range(3):
            fleet.load()
        late = FakeNode("b", SIZES, room=NO_ROOM)
        fleet.nodes.append(late)
        late.join(control)
        assert (await fleet.deploy(Deployment("m", "/m", 1))).revision == 3, "another node can stand in"


def test_a_surge_takes_no_model_from_a_node():
    cluster, fleet = simulated("ab", replace(M, replicas=1))
    (serving,) = fleet.ready()
    (other,) = [node for node in fleet.nodes if node.node_id != serving]
    cluster.catalog.put(Deployment("other", "/m", 1, 1))
    for _ in range(3):
        fleet.advance(cluster.now)
    assert "other" in other.models
    assert roll(cluster, fleet, replace(NEW, replicas=1), until=40)[2] == {serving}
    assert "other" in other.models


def test_a_surge_that_fails_leaves_the_earlier_revision_everywhere():
    bound = {"min_replicas": 2}
    cluster, fleet = simulated("abc", replace(M, **bound))
    before = fleet.ready()
    cluster.catalog.put(replace(NEW, **bound))
    for _ in range(3):  # it is measured, told, and begins
        fleet.advance(cluster.now, 100.0)
    (surge,) = [node for node in fleet.nodes if node.node_id not in before]
    assert surge.assigned["m"].revision == 2
    surge.models["m"] = replace(surge.models["m"], state=FAILED, reason="shape mismatch")
    for _ in range(20):
        cluster.now += 1.0
        fleet.round()
    assert fleet.ready() == before
    status = cluster.reconciler.status()[0]
    assert (status.halted, status.waits_for) == (True, "1 of 3 nodes failed with it")
    assert "m" not in surge.assigned


def test_a_node_that_was_told_of_a_revision_just_before_the_next_one_has_a_place_in_its_change():
    """It may have begun, and has not reported that yet."""
    cluster, fleet = simulated("abc", replace(M, replicas=0))
    fleet.nodes[2].room = 100  # where it comes first: both fit
    fleet.round()
    cluster.catalog.put(replace(NEW, replicas=0))
    for _ in range(2):
        fleet.round()
    assert fleet.revisions() == [1, 1, 2]
    cluster.catalog.put(replace(NEW, replicas=0, path="/other", revision=3))
    for _ in range(5):
        cluster.now += 1.0
        cluster.tick()
        for node in fleet.nodes[:2]:
            node.beat(cluster)
    assert fleet.revisions() == [1, 1, 2]
    fleet.round()
    assert fleet.revisions() == [1, 1, 3]


def two_models(room):
    """A node with two models of 10 bytes each, of which none may be away. New revisions need 20."""
    limits = RolloutLimits(max_unavailable=0.0)
    models = [Deployment(name, "/m", 0, 1, rollout=limits) for name in "mk"]
    cluster = Simulated(*models, bounds=RolloutBounds(min_ready_s=1.0))
    fleet = Fleet(cluster, "a", sizes=SIZES, room=room)
    for _ in range(4):
        fleet.advance(cluster.now)
    assert fleet.nodes[0].models.keys() == {"m", "k"}
    for each in models:
        cluster.catalog.put(replace(each, path="/new", revision=2))
    return cluster, fleet


def changing(fleet):
    return {name for name, report in fleet.nodes[0].models.items() if report.next_revision or report.revision == 2}


def test_two_models_of_a_node_do_not_both_count_the_same_free_memory():
    cluster, fleet = two_models(room=50)
    sizes = []
    for _ in range(40):
        cluster.now += 1.0
        fleet.advance(cluster.now, 5.0)
        reports = fleet.nodes[0].models.values()
        assert all(report.state is READY for report in reports), "none is away"
        sizes.append(sum(report.memory_bytes + (20 if report.next_revision else 0) for report in reports))
    assert changing(fleet) == {"m", "k"}
    assert max(sizes) == 50, "one after the other"
    cluster, fleet = two_models(room=60)
    for _ in range(4):
        cluster.now += 1.0
        fleet.advance(cluster.now, 5.0)
    assert changing(fleet) == {"m", "k"}, "at once, where there is room for both"


def test_a_model_that_sleeps_is_not_replaced_beside_itself_where_none_may_be_away():
    """Its node has no ranks of it: it would be loaded in its place, and answer nobody meanwhile."""
    none_away = replace(M, replicas=1, idle_unload_s=60.0, rollout=RolloutLimits(max_unavailable=0.0))
    cluster, fleet = simulated("a", none_away, room=100)
    asleep = fleet.nodes[0].models["m"] = replace(fleet.nodes[0].models["m"], asleep=True, load=Load())
    cluster.catalog.put(replace(none_away, path="/new", revision=2))
    for _ in range(20):
        cluster.now += 1.0
        fleet.round()
    assert fleet.nodes[0].assigned["m"].revision == 1
    fleet.nodes[0].models["m"] = replace(asleep, asleep=False)
    for _ in range(3):
        fleet.round()
    assert fleet.nodes[0].assigned["m"].revision == 2


def test_a_single_model_that_sleeps_is_replaced_in_its_place():
    """Nobody misses it: a request would have to load it anyway."""
    one = replace(M, replicas=1, idle_unload_s=60.0)
    cluster, fleet = simulated("a", one, room=NO_ROOM)
    new = replace(one, path="/new", revision=2)
    assert "no node has room" in cluster.reconciler.irreplaceable(new)
    asleep = fleet.nodes[0].models["m"] = replace(fleet.nodes[0].models["m"], asleep=True, load=Load())
    fleet.round()
    assert cluster.reconciler.irreplaceable(new) == ""
    cluster.catalog.put(new)
    for _ in range(40):
        cluster.now += 1.0
        fleet.nodes[0].models.setdefault("m", asleep)
        fleet.round()
    assert fleet.nodes[0].assigned["m"].revision == 2


def test_a_node_that_returns_keeps_what_it_has_until_it_is_placed():
    """It was cut off from the orchestrator alone, and answers requests."""
    cluster, fleet = simulated("ab", M)
    cut_off = fleet.nodes[0]
    assert cut_off.assigned["m"].revision == 1
    cluster.registry.leave(cut_off.node_id, cut_off.lease_id)
    cluster.reconciler.update()
    cut_off.join(cluster)
    assert cut_off.assigned["m"].revision == 1, "it keeps the model until the next placement"
    cluster.reconciler.update()
    cut_off.beat(cluster)
    assert cut_off.assigned["m"].revision == 1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 5), st.booleans(), st.integers(0, 2**32))
def test_no_rollout_and_no_drain_goes_below_the_minimum(replicas, spare, least, none_away, seed):
    """Whatever fits where, with restarts, drains that are allowed, and nodes that stop loading."""
    chance = random.Random(seed)
    least = min(least, replicas)
    limits = RolloutLimits(max_unavailable=0.0 if none_away else chance.choice((0.3, 1.0)), allow_outage=chance.random() < 0.3)
    bounds = {"replicas": replicas, "min_replicas": least, "rollout": limits}
    names = [f"n{number}" for number in range(replicas + spare)]
    cluster, fleet = simulated(names, replace(M, **bounds), bounds=RolloutBounds(min_ready_s=2.0, progress_s=30.0))
    for node in fleet.nodes:
        node.room = chance.choice((NO_ROOM, 100))
    fleet.round()
    cluster.catalog.put(replace(NEW, **bounds))
    floor = max(least, replicas if none_away and not limits.allow_outage else 0)
    for _ in range(80):
        cluster.now += chance.choice((0.5, 1.0, 3.0))
        if chance.random() < 0.03:
            cluster.restart()
        if chance.random() < 0.03:
            node = cluster.registry.find(chance.choice(names))
            try:
                cluster.reconciler.check_drain(node)
            except RyzansteinError:
                pass
            else:
                cluster.registry.drain(node.node_id)
                floor = least  # who drains a node has it away
        fleet.advance(cluster.now, 4.0)
        assert len(fleet.ready()) >= floor
        assert len([node for node in fleet.nodes if "m" in node.assigned]) <= replicas + 1


async def test_what_no_node_could_change_to_is_refused_and_not_stored(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES, room=NO_ROOM)
        for bounds, why in (
            ({"min_replicas": 2}, "min_replicas is 2"),
            ({"rollout": RolloutLimits(max_unavailable=0.0)}, "rollout.max_unavailable is 0"),
        ):
            for replicas in (0, 2):
                await fleet.deploy(Deployment("m", "/m", replicas, **bounds))
                fleet.load()
                error = await refused(fleet.deploy(Deployment("m", "/new", replicas, **bounds)))
                assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "CANNOT_BE_REPLACED")
                assert why in error.message
                assert control.deployment("m").path == "/m"
                await control.remove("m")
        await fleet.deploy(Deployment("m", "/m", 2, min_replicas=2))
        fleet.load()
        for allowed in ({"min_replicas": 1}, {"rollout": RolloutLimits(max_unavailable=0.0, allow_outage=True)}):
            assert (await fleet.deploy(Deployment("m", "/new", 2, **allowed))).path == "/new"
            fleet.load()
            fleet.load()
            await fleet.deploy(Deployment("m", "/m", 2))
            fleet.load()
            fleet.load()
        fleet.nodes[0].room = 100
        fleet.round()
        assert (await fleet.deploy(Deployment("m", "/new", 2, min_replicas=2))).path == "/new", "it fits beside on one"


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another deployment"])
async def test_whether_a_model_can_be_replaced_does_not_depend_on_other_deployments(path, other):
    """Nodes were started with it, so that nothing is assigned yet."""
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes={**SIZES, "/k": 1}, room=NO_ROOM)
        if other:
            await fleet.deploy(Deployment("k", "/k"))
            fleet.load()
        for node in fleet.nodes:
            node.models["m"] = ModelReport("m", "/m", 0, READY, memory_bytes=10, started_with=True)
        fleet.round()
        error = await refused(fleet.deploy(Deployment("m", "/new", rollout=RolloutLimits(max_unavailable=0.0))))
        assert error.reason == "CANNOT_BE_REPLACED"


async def test_a_deployment_for_every_node_may_be_on_no_more_than_its_maximum(path):
    async with restored(path) as control:
        fleet = Fleet(control, *"abcde", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m", max_replicas=3))
        assert [each is not None for each in fleet.revisions()].count(True) == 3
        assert control._reconciler._placement.short(fleet.status().deployment) == 0
        await fleet.deploy(Deployment("m", "/m"))
        assert fleet.revisions() == [1] * 5


async def test_bounds_and_halts_outlive_the_orchestrator_until_the_model_is_deployed_again(path):
    limits = RolloutLimits(0.5, 0.0, 300.0, 0.1)
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m", min_replicas=1, max_replicas=3, rollout=limits))
        fleet.load()
        stored = await fleet.deploy(Deployment("m", "/new", min_replicas=1, max_replicas=3, rollout=limits))
        first = fleet.nodes[0]
        first.models["m"] = replace(first.models["m"], next_revision=2, next_state=FAILED, next_reason="shape mismatch")
        fleet.round()
        why = "1 of 3 nodes failed with it"
        assert (fleet.status().halted, fleet.status().waits_for) == (True, why)
        assert control._telemetry.halted.labels("m")._value.get() == 1
        await control._recorder.flush_all()
    first.models["m"] = replace(first.models["m"], next_revision=0, next_reason="")
    first.models["m"] = replace(first.models["m"], next_state=type(READY)(0))
    async with restored(path) as control:
        assert control.deployment("m") == stored
        control._models._sources.refusals.forget("m")  # as after ten minutes
        fleet.join(control)
        for _ in range(3):
            fleet.round()
        assert fleet.revisions() == [1, 1, 1]
        assert (fleet.status().halted, fleet.status().waits_for) == (True, why)
        await fleet.deploy(replace(stored, revision=0))
        assert fleet.status().halted is False
        assert control._telemetry.halted.labels("m")._value.get() == 0
        assert fleet.revisions() == [2, 1, 1]


async def test_a_rollback_is_a_new_revision_of_the_earlier_directory_with_the_bounds_that_are(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES)
        assert (await refused(control.deploy(Deployment("m", ""), DeployOptions(rollback=True)))).code is Code.NOT_FOUND
        await fleet.deploy(Deployment("m", "/m", 2, min_replicas=1, idle_unload_s=60))
        fleet.load()
        error = await refused(control.deploy(Deployment("m", ""), DeployOptions(rollback=True)))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NO_EARLIER_REVISION")
        await fleet.deploy(Deployment("m", "/new", 2, min_replicas=1, idle_unload_s=60))
        fleet.load()
        assert sorted(fleet.revisions()) == [2, 2], "the last wave changes one of them"
        fleet.load()
    async with restored(path) as control:
        fleet.join(control)
        fleet.round()
        back = await fleet.deploy(Deployment("m", ""), options=DeployOptions(rollback=True))
        assert back == Deployment("m", "/m", 2, 3, 60, 1, earlier_path="/new")
        assert sorted(fleet.revisions()) == [2, 3], "in waves"
        for _ in range(3):
            fleet.load()
        assert fleet.revisions() == [3, 3]
        again = await fleet.deploy(Deployment("m", ""), options=DeployOptions(rollback=True))
        assert (again.path, again.revision) == ("/new", 4)


async def test_an_outage_that_a_rollback_allows_is_allowed_for_that_change_alone_and_outlives_the_orchestrator(path):
    none_away = RolloutLimits(max_unavailable=0.0)
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES, room=NO_ROOM)
        for directory in ("/m", "/new"):
            await fleet.deploy(Deployment("m", directory))
            for _ in range(3):
                fleet.load()
        await fleet.deploy(Deployment("m", "/new", rollout=none_away))
        back = DeployOptions(rollback=True)
        assert (await refused(fleet.deploy(Deployment("m", ""), options=back))).reason == "CANNOT_BE_REPLACED"
        stored = await fleet.deploy(Deployment("m", ""), options=replace(back, allow_outage=True))
        assert (stored.path, stored.revision, stored.rollout) == ("/m", 3, none_away)
        assert sorted(fleet.revisions()) == [2, 3]
        await fleet.deploy(Deployment("m", "/m", idle_unload_s=5.0, rollout=none_away))  # which changes no files
    async with restored(path) as control:
        fleet.join(control)
        for _ in range(3):
            fleet.load()
        assert fleet.ready() == {"a": 3, "b": 3}
        assert (await refused(fleet.deploy(Deployment("m", ""), options=back))).reason == "CANNOT_BE_REPLACED"


async def test_a_rollback_does_not_undo_what_was_deployed_while_nodes_measured(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m", 1))
        fleet.load()
        new = await fleet.deploy(Deployment("m", "/new", 1))
        back = asyncio.create_task(control.deploy(Deployment("m", ""), DeployOptions(rollback=True)))
        await asyncio.sleep(0)
        again = await control.deploy(replace(new, min_replicas=0), DeployOptions(reload=True))
        assert not back.done(), "the earlier directory is not measured yet"
        while not back.done():
            fleet.round()
            await asyncio.sleep(0.001)
        error = await refused(back)
        assert (error.code, error.reason) == (Code.ABORTED, "DEPLOYED_MEANWHILE")
        assert control.deployment("m") == again


@pytest.mark.parametrize(("num_nodes", "most"), [(20, 100), (500, 52)])
def test_changes_in_each_tick_of_a_large_cluster_cost_fewer_placements(num_nodes: int, most: int) -> None:
    cluster = Simulated(Deployment("m", "/m", 5), bounds=RolloutBounds())
    for number in range(num_nodes):
        cluster.register(Node(f"n{number}", "h:1", "1", state=READY, memory_bytes=100))
    with patch.object(cluster.reconciler, "_place", wraps=cluster.reconciler._place) as placed:
        for _ in range(100):  # ticks of ten seconds
            cluster.now += 0.1
            cluster.reconciler.invalidate()
            cluster.tick()
    assert placed.call_count <= most
    assert placed.call_count >= most - 10
