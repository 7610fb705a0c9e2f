from __future__ import annotations

import asyncio
import contextlib
import functools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ryzanstein.cluster import Beat, Deployment, Load, Node, NodeReport, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.state.watch import ClusterDelta, ClusterState, Snapshot, WatchHub
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

QUEUE_BOUND = 3


class Cluster:
    """Registry and catalog under one hub, on a clock that stands still unless moved."""

    def __init__(self, queue_bound=QUEUE_BOUND, max_watchers=8):
        self.now = 0.0
        self.telemetry = OrchestratorTelemetry()
        self.hub = WatchHub("e", self.state, self.telemetry, queue_bound=queue_bound, max_watchers=max_watchers)
        self.registry = Registry(self.hub.publish, lease_s=3, max_nodes=4, monotonic=lambda: self.now, wall=lambda: self.now)
        self.catalog = Catalog(self.hub.publish, 4)
        self.hub.open()

    def state(self):
        return ClusterState(self.registry.nodes(), self.catalog.deployments())


@pytest.fixture
def cluster():
    return Cluster()


def drain(watcher, follower):
    while (update := watcher.take()) is not None:
        follower.apply(update)


def test_a_new_watcher_gets_the_whole_cluster_first(cluster, make_node, make_follower):
    cluster.registry.join(make_node("a"))
    follower = make_follower()
    with cluster.hub.watch() as watcher:
        drain(watcher, follower)
        assert (list(follower.nodes), follower.version, follower.snapshots) == (["a"], 1, 1)
        cluster.registry.join(make_node("b"))
        cluster.catalog.put(Deployment("m", "/m"))
        drain(watcher, follower)
    assert (sorted(follower.nodes), list(follower.deployments)) == (["a", "b"], ["m"])
    assert (follower.snapshots, follower.deltas) == (1, 2)


def test_a_watcher_that_falls_behind_gets_a_snapshot_instead_of_a_queue(cluster, make_node, make_follower):
    follower = make_follower()
    with cluster.hub.watch() as watcher:
        drain(watcher, follower)
        for incarnation in range(QUEUE_BOUND + 1):
            cluster.registry.join(make_node("a", f"i{incarnation}"))
        drain(watcher, follower)
    assert (follower.snapshots, follower.deltas) == (2, 0)
    assert follower.nodes["a"].incarnation == f"i{QUEUE_BOUND}"
    assert cluster.telemetry.snapshots.labels("overflow")._value.get() == 1


def test_one_slow_watcher_does_not_cost_another_its_deltas(cluster, make_node, make_follower):
    fast, slow = make_follower(), make_follower()
    with cluster.hub.watch() as reading, cluster.hub.watch() as sleeping:
        drain(reading, fast)
        drain(sleeping, slow)
        for incarnation in range(10):
            cluster.registry.join(make_node("a", f"i{incarnation}"))
            drain(reading, fast)
        drain(sleeping, slow)
    assert (fast.snapshots, fast.deltas) == (1, 10)
    assert (slow.snapshots, slow.deltas) == (2, 0)
    assert fast.nodes == slow.nodes


def test_too_many_watchers_are_refused(cluster):
    contexts = [cluster.hub.watch() for _ in range(8)]
    for context in contexts:
        context.__enter__()
    with pytest.raises(RyzansteinError) as failure, cluster.hub.watch():
        pass
    assert failure.value.code is Code.RESOURCE_EXHAUSTED
    contexts[0].__exit__(None, None, None)
    with cluster.hub.watch() as watcher:
        assert isinstance(watcher.take(), Snapshot)


async def test_updates_wait_for_changes_and_end_with_unavailable_when_the_hub_closes(cluster, make_node):
    updates = cluster.hub.updates()
    assert isinstance(await anext(updates), Snapshot)
    waiting = asyncio.ensure_future(anext(updates))
    await asyncio.sleep(0)
    assert not waiting.done()
    cluster.registry.join(make_node("a"))
    assert isinstance(await asyncio.wait_for(waiting, 5), ClusterDelta)
    cluster.hub.close()
    with pytest.raises(RyzansteinError) as failure:
        await asyncio.wait_for(anext(updates), 5)
    assert failure.value.code is Code.UNAVAILABLE


async def test_nothing_is_sent_before_the_hub_opens(make_node):
    cluster = Cluster()
    closed = WatchHub("e", cluster.state, cluster.telemetry, queue_bound=1, max_watchers=1)
    updates = closed.updates()
    first = asyncio.ensure_future(anext(updates))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not first.done()
    cluster.registry.join(make_node("a"))
    closed.open()
    snapshot = await asyncio.wait_for(first, 5)
    assert [node.node_id for node in snapshot.state.nodes] == ["a"]
    await updates.aclose()


async def test_a_watcher_that_goes_away_is_forgotten(cluster):
    updates = cluster.hub.updates()
    await anext(updates)
    assert cluster.telemetry.watchers._value.get() == 1
    await updates.aclose()
    assert cluster.telemetry.watchers._value.get() == 0


def without_loads(nodes):
    """What watchers see at once: everything but loads and beat times, which may lag."""
    return {n.node_id: (n.incarnation, n.state, n.model, n.drain_requested, n.join_time) for n in nodes}


class WatchMachine(RuleBasedStateMachine):
    """Anything may happen, and two watchers read when they like."""

    names = st.sampled_from("abcde")

    def __init__(self, make_follower):
        super().__init__()
        self.cluster = Cluster()
        self.readers = [(self.cluster.hub.watch(), make_follower()) for _ in range(2)]
        self.watchers = [(context.__enter__(), follower) for context, follower in self.readers]
        self.leases = {}
        self.sequence = 0
        self.versions = [0]

    def teardown(self):
        for context, _ in self.readers:
            context.__exit__(None, None, None)

    @rule(name=names, incarnation=st.sampled_from("123"))
    def join(self, name, incarnation):
        with contextlib.suppress(RyzansteinError):
            self.leases[name] = self.cluster.registry.join(Node(name, "h:1", incarnation))

    @rule(name=names, state=st.sampled_from(NodeState), model=st.sampled_from(["", "m"]), running=st.integers(0, 2))
    def beat(self, name, state, model, running):
        self.sequence += 1
        beat = Beat(self.sequence, state, model, load=Load(running=running))
        with contextlib.suppress(RyzansteinError):
            self.cluster.registry.beat(name, self.leases.get(name, ""), NodeReport(beat))

    @rule(name=names)
    def drain(self, name):
        with contextlib.suppress(RyzansteinError):
            self.cluster.registry.drain(name)

    @rule(name=names)
    def leave(self, name):
        with contextlib.suppress(RyzansteinError):
            self.cluster.registry.leave(name, self.leases.get(name, ""))

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds):
        self.cluster.now += seconds
        self.cluster.registry.expire()

    @rule(model=st.sampled_from("xyz"), replicas=st.integers(0, 2))
    def deploy(self, model, replicas):
        self.cluster.catalog.put(Deployment(model, "/m", replicas))

    @rule(model=st.sampled_from("xyz"))
    def remove(self, model):
        with contextlib.suppress(RyzansteinError):
            self.cluster.catalog.remove(model)

    @rule(limit=st.integers(0, 3))
    def publish_loads(self, limit):
        self.cluster.registry.publish_loads(limit)

    @rule(which=st.integers(0, 1), at_most=st.integers(1, 5))
    def read(self, which, at_most):
        watcher, follower = self.watchers[which]
        for _ in range(at_most):
            if (update := watcher.take()) is not None:
                follower.apply(update)

    @rule(which=st.integers(0, 1))
    def read_all(self, which):
        watcher, follower = self.watchers[which]
        drain(watcher, follower)
        state = self.cluster.state()
        assert without_loads(follower.nodes.values()) == without_loads(state.nodes)
        assert follower.deployments == {d.model: d for d in state.deployments}
        assert follower.version == self.cluster.hub.version

    @rule(which=st.integers(0, 1))
    def read_all_after_the_loads(self, which):
        while self.cluster.registry.publish_loads(2):
            pass
        self.read_all(which)
        _, follower = self.watchers[which]
        assert {n.node_id: n.load for n in follower.nodes.values()} == {
            n.node_id: n.load for n in self.cluster.registry.nodes()
        }

    @invariant()
    def versions_only_grow(self):
        self.versions.append(self.cluster.hub.version)
        assert self.versions[-1] >= self.versions[-2]

    @invariant()
    def members_are_bounded(self):
        assert len(self.cluster.registry) <= 4


def test_snapshot_and_deltas_applied_always_equal_the_registry(make_follower):
    run_state_machine_as_test(
        functools.partial(WatchMachine, make_follower),
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )


def test_a_watcher_that_wants_no_loads_gets_all_else_without_a_gap(cluster, make_node, make_follower):
    lease = cluster.registry.join(make_node("a"))
    follower = make_follower()
    with cluster.hub.watch(loads=False) as watcher, cluster.hub.watch() as curious:
        drain(watcher, follower)
        everything = make_follower()
        drain(curious, everything)
        for running in (1, 2, 3):
            cluster.registry.beat("a", lease, NodeReport(Beat(running, NodeState.READY, load=Load(running=running))))
            cluster.registry.publish_loads(10)
            cluster.catalog.put(Deployment(f"m{running}", "/m"))
            drain(watcher, follower)
            drain(curious, everything)
    assert everything.deltas - follower.deltas == 2, "the first beat also changed the state"
    assert (follower.snapshots, list(follower.deployments)) == (1, ["m1", "m2", "m3"])
    assert follower.nodes["a"].state is NodeState.READY
