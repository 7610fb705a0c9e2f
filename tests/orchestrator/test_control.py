"""The control plane without gRPC: restarts, settling, stalls, and what 1,000 nodes cost watchers."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ryzanstein.cluster import Beat, Deployment, Load, NodeReport, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import TICK_S, ControlPlane
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry


@asynccontextmanager
async def restored(path, **settings):
    """A control plane on the file; leaving the block is a crash: nothing is closed but the file."""
    telemetry = OrchestratorTelemetry()
    store = await Store.open(path, telemetry)
    try:
        yield await ControlPlane.restore(OrchestratorSettings(database=path, **settings), store, telemetry)
    finally:
        await store.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "o.sqlite"


def come_back(control, node):
    grant = control.register(node)
    control.beat(node.node_id, grant.lease_id, NodeReport(Beat(1, NodeState.READY)))


async def first_update(control):
    updates = control.updates()
    try:
        return await asyncio.wait_for(anext(updates), 10)
    finally:
        await updates.aclose()


async def test_an_empty_cluster_answers_its_first_watcher_at_once(path):
    async with restored(path, tuning={"settle_s": 3600}) as control:
        assert (await first_update(control)).state.nodes == ()


async def test_after_a_restart_the_snapshot_waits_for_every_member_of_before(path, make_node):
    async with restored(path) as control:
        control.register(make_node("a"))
        control.register(make_node("b"))
        await control.close()
    async with restored(path, tuning={"settle_s": 3600}) as control:
        waiting = asyncio.ensure_future(first_update(control))
        come_back(control, make_node("a"))
        come_back(control, make_node("stranger"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        come_back(control, make_node("b"))
        assert {node.node_id for node in (await waiting).state.nodes} == {"a", "b", "stranger"}


async def test_after_a_restart_the_snapshot_waits_no_longer_than_the_settling_time(path, make_node):
    async with restored(path) as control:
        come_back(control, make_node("gone"))
        await control.close()
    async with restored(path, tuning={"settle_s": 0.2}) as control:
        clockwork = asyncio.create_task(control.run())
        assert (await first_update(control)).state.nodes == ()
        clockwork.cancel()


async def test_a_second_restart_while_settling_still_waits_for_the_members_of_before(path, make_node):
    async with restored(path) as control:
        come_back(control, make_node("a"))
        come_back(control, make_node("b"))
        await control.close()
    async with restored(path, tuning={"settle_s": 3600}) as control:
        come_back(control, make_node("a"))
        await control.close()
    async with restored(path, tuning={"settle_s": 3600}) as control:
        waiting = asyncio.ensure_future(first_update(control))
        come_back(control, make_node("a"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        come_back(control, make_node("b"))
        await waiting


async def test_each_restart_has_an_epoch_of_its_own(path):
    epochs = set()
    for _ in range(3):
        async with restored(path) as control:
            epochs.add((await first_update(control)).epoch)
    assert len(epochs) == 3


async def test_while_settling_nodes_are_not_told_that_the_others_are_gone(path, make_node):
    async with restored(path) as control:
        for node_id in "ab":
            come_back(control, make_node(node_id))
        await control.close()
    async with restored(path, tuning={"settle_s": 3600}) as control:
        grant = control.register(make_node("a"))
        asking = NodeReport(Beat(1, NodeState.READY), members_digest=b"")
        assert control.beat("a", grant.lease_id, asking).members is None
        come_back(control, make_node("b"))
        assert control.beat("a", grant.lease_id, asking).members is not None


async def test_while_settling_nodes_keep_what_they_serve_and_afterwards_the_placement_rules(path, make_node):
    async with restored(path) as control:
        deployment = await control.deploy(Deployment("m", "/m", 1))
        for name in "ab":
            control.register(make_node(name))
        await control.close()
    async with restored(path, tuning={"settle_s": 3600}) as control:
        leases = {"a": control.register(make_node("a")).lease_id}
        assert control.beat("a", leases["a"], NodeReport(Beat(1, NodeState.READY, ""))).deployments == (), "b may serve it"
        leases["b"] = control.register(make_node("b")).lease_id
        assert control.beat("b", leases["b"], NodeReport(Beat(1, NodeState.READY, "m"))).deployments == (deployment,)
        control.tick()
        assert control.beat("b", leases["b"], NodeReport(Beat(2, NodeState.READY, "m"))).deployments == (deployment,)
        assert control.beat("a", leases["a"], NodeReport(Beat(2, NodeState.READY, ""))).deployments == ()


async def test_a_drain_request_and_a_deployment_survive_a_crash(path, make_node):
    async with restored(path) as control:
        control.register(make_node("a"))
        await control.drain("a")
        await control.deploy(Deployment("m", "/m"))
    async with restored(path) as control:
        grant = control.register(make_node("a"))
        assert control.nodes()[0].drain_requested
        assert control.beat("a", grant.lease_id, NodeReport(None)).drain
        assert [status.deployment.model for status in control.deployments()] == ["m"]


async def test_what_a_node_failed_to_serve_is_remembered_over_a_restart(path, make_node, eventually):
    async with restored(path) as control:
        await control.deploy(Deployment("broken", "/broken", 1))
        grants = {name: control.register(make_node(name)) for name in "ab"}
        control.tick()
        (chosen,) = control.deployments()[0].assigned_nodes
        failed = NodeReport(Beat(1, NodeState.FAILED, "broken"))
        control.beat(chosen, grants[chosen].lease_id, failed)
        recording = asyncio.create_task(control.run())
        await eventually(lambda: control.deployments()[0].assigned_nodes not in ((), (chosen,)), "the other node is chosen")
        await asyncio.sleep(0.5)
        recording.cancel()
    async with restored(path, tuning={"settle_s": 0}) as control:
        for name in "ab":
            come_back(control, make_node(name))
        control.tick()
        (status,) = control.deployments()
        assert chosen not in status.assigned_nodes
        assert [each.reason for each in status.shortages if each.node_id == chosen] == ["failed lately"]


async def test_a_caller_that_goes_away_leaves_its_deployment_written_and_in_force(path):
    async with restored(path) as control:
        call = asyncio.create_task(control.deploy(Deployment("m", "/m")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await control.close()
        assert [status.deployment.model for status in control.deployments()] == ["m"]
    async with restored(path) as control:
        assert [status.deployment.model for status in control.deployments()] == ["m"]


async def test_too_many_writes_at_once_are_refused(path):
    async with restored(path) as control:
        results = await asyncio.gather(*(control.deploy(Deployment(f"m{i}", "/m")) for i in range(100)), return_exceptions=True)
        refused = [error for error in results if isinstance(error, RyzansteinError)]
        assert len(refused) == 36
        assert {error.code for error in refused} == {Code.RESOURCE_EXHAUSTED}
        assert len(control.deployments()) == 64


async def test_deployments_are_bounded(path):
    async with restored(path, tuning={"max_deployments": 2}) as control:
        for model in ("x", "y", "x"):
            await control.deploy(Deployment(model, "/m"))
        with pytest.raises(RyzansteinError) as failure:
            await control.deploy(Deployment("z", "/m"))
        assert failure.value.reason == "TOO_MANY_DEPLOYMENTS"
        await control.remove("x")
        await control.deploy(Deployment("z", "/m"))


async def test_a_process_that_stood_still_does_not_expire_its_nodes(path, make_node, eventually):
    async with restored(path, lease_s=0.6, tuning={"heartbeat_interval_s": 0.1}) as control:
        control.register(make_node("a"))
        clockwork = asyncio.create_task(control.run())
        await asyncio.sleep(0.02)
        # The loop itself is blocked for longer than the lease, as by SIGSTOP or a suspended machine.
        time.sleep(0.8)  # noqa: ASYNC251
        await asyncio.sleep(2 * TICK_S)
        assert [node.node_id for node in control.nodes()] == ["a"]
        await eventually(lambda: not control.nodes(), "the end of the lease that began anew")
        clockwork.cancel()


async def test_a_thousand_beating_nodes_cost_a_watcher_no_more_than_the_bound(path, make_node, make_follower):
    """1,000 nodes of which each beats 20 times with a new load every time: 20,000 beats."""
    ticks, per_tick = 20, 10
    async with restored(path, tuning={"load_updates_per_s": round(per_tick / TICK_S)}) as control:
        grants = {f"n{i}": control.register(make_node(f"n{i}")).lease_id for i in range(1000)}
        follower, updates = make_follower(), control.updates()
        follower.apply(await anext(updates))
        for sequence in range(1, ticks + 1):
            for node_id, lease_id in grants.items():
                control.beat(node_id, lease_id, NodeReport(Beat(sequence, NodeState.STARTING, load=Load(running=sequence))))
            control.tick()
            for _ in range(per_tick):
                follower.apply(await anext(updates))
        assert (follower.snapshots, follower.deltas) == (1, ticks * per_tick)
        assert await _is_silent(updates)
        assert len(follower.nodes) == 1000
        refreshed = [node for node in follower.nodes.values() if node.load.running]
        assert len(refreshed) == ticks * per_tick, "each delta was spent on another node, oldest first"


async def test_a_burst_of_changes_costs_one_placement(path, make_node):
    async with restored(path) as control:
        await control.deploy(Deployment("m", "/m", 10))
        control.tick()
        before = placements(control)
        for i in range(1000):
            grant = control.register(make_node(f"n{i}"))
            control.beat(f"n{i}", grant.lease_id, NodeReport(Beat(1, NodeState.READY, "")))
        control.tick()
        assert len(control.deployments()[0].assigned_nodes) == 10, "an answer is up to date, also between two looks"
        assert placements(control) == before + 1


def placements(control):
    return control._telemetry.placements._value.get()


async def _is_silent(updates):
    waiting = asyncio.ensure_future(anext(updates))
    for _ in range(5):
        await asyncio.sleep(0)
    silent = not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return silent


async def test_in_a_large_cluster_a_node_is_not_told_of_each_other_one_at_once(path, make_node, monkeypatch):
    async with restored(path) as control:
        lease = control.register(make_node("a")).lease_id
        for number in range(30):
            control.register(replace(make_node(f"n{number}"), address=f"10.1.0.{number}:1"))

        def told(sequence, digest=b""):
            return control.beat("a", lease, NodeReport(Beat(sequence, NodeState.READY), members_digest=digest)).members

        first = told(1)
        assert first is not None
        control.register(replace(make_node("late"), address="10.0.0.1:1"))
        monkeypatch.setattr("ryzanstein.orchestrator.state.members.address_book._TELL_S", 100.0)
        assert told(2, first.digest) is None, "it was told a moment ago"
        monkeypatch.setattr("ryzanstein.orchestrator.state.members.address_book._TELL_S", 0.0)
        second = told(3, first.digest)
        assert second is not None
        assert told(4, second.digest) is None
