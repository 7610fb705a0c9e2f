"""The RPCs over a real server on loopback."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict

from ryzanstein.cluster import Node
from ryzanstein.orchestrator import service
from ryzanstein.orchestrator.service import WatchMessages
from ryzanstein.orchestrator.state.changes import NodeChanged, NodeLeft
from ryzanstein.orchestrator.state.watch import ClusterDelta, ClusterState, Snapshot
from ryzanstein.rpc import status
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2_grpc as pb_grpc
from ryzanstein.v1 import worker_pb2

READY = worker_pb2.NODE_STATE_READY


class Beats:
    """A node's heartbeat stream."""

    def __init__(self, serving, node_id, lease_id):
        self._node_id, self._lease_id, self._sequence = node_id, lease_id, 0
        self.call = serving.stub.Heartbeat()

    async def beat(self, digest=None, takes_changes=False, **fields):
        self._sequence += 1
        beat = worker_pb2.Beat(sequence=self._sequence, **fields)
        request = pb.HeartbeatRequest(node_id=self._node_id, lease_id=self._lease_id, beat=beat, members_digest=digest)
        request.takes_member_changes = takes_changes
        await self.call.write(request)
        answer = await asyncio.wait_for(self.call.read(), 10)
        assert answer is not grpc.aio.EOF
        return answer


async def next_update(call):
    update = await asyncio.wait_for(call.read(), 10)
    assert update is not grpc.aio.EOF
    return update


async def test_a_node_registers_beats_and_is_seen(serving, eventually):
    watch = serving.stub.WatchCluster(pb.WatchClusterRequest(watcher_id="t"))
    assert list((await next_update(watch)).snapshot.nodes) == []
    grant = await serving.register("a", incarnation="i", context_length=0, host="h7", zone="z1")
    assert (grant.lease_duration.ToSeconds(), grant.heartbeat_interval.ToMilliseconds()) == (3, 500)
    assert (await next_update(watch)).delta.node.node_id == "a"
    beats = Beats(serving, "a", grant.lease_id)
    answer = await beats.beat(state=READY, model="m", context_length=512)
    answer.ClearField("leader_id")
    assert MessageToDict(answer) == {"plural": True, "leaderEpoch": "1"}
    delta = (await next_update(watch)).delta
    assert (delta.version, delta.node.state, delta.node.model, delta.node.context_length) == (2, READY, "m", 512)
    (node,) = (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes
    assert (node.address, node.incarnation, node.state) == ("127.0.0.1:50061", "i", READY)
    assert (node.host, node.zone) == ("h7", "z1")
    watch.cancel()


async def test_a_node_is_told_where_the_others_are_once(serving):
    grants = [await serving.register(node_id, address=f"10.0.0.{i}:50061") for i, node_id in enumerate("ab")]
    beats = [Beats(serving, node_id, grant.lease_id) for node_id, grant in zip("ab", grants, strict=True)]
    older = await beats[0].beat(state=READY)
    assert not older.HasField("members"), "a node of the version before does not ask"
    members = (await beats[0].beat(b"", state=READY)).members
    assert list(members.addresses) == ["10.0.0.0:50061", "10.0.0.1:50061"]
    assert not (await beats[0].beat(members.digest, state=READY)).HasField("members")
    assert (await beats[1].beat(b"other", state=READY)).members == members
    await serving.stub.LeaveNode(pb.LeaveNodeRequest(node_id="b", lease_id=grants[1].lease_id))
    left = (await beats[0].beat(members.digest, state=READY)).members
    assert list(left.addresses) == ["10.0.0.0:50061"]
    await serving.register("b", address="10.0.0.1:50061")
    assert (await beats[0].beat(left.digest, state=READY)).members == members, "the same addresses have one digest"


async def test_a_node_that_knows_the_addresses_is_told_what_changed(serving):
    grants = [await serving.register(node_id, address=f"10.0.0.{i}:1") for i, node_id in enumerate("abcd")]
    beats = Beats(serving, "a", grants[0].lease_id)
    members = (await beats.beat(b"", state=READY)).members
    await serving.stub.LeaveNode(pb.LeaveNodeRequest(node_id="b", lease_id=grants[1].lease_id))
    await serving.register("e", address="10.0.0.9:1")
    change = (await beats.beat(members.digest, takes_changes=True, state=READY)).members
    assert (change.since, change.addresses, change.removed) == (members.digest, ["10.0.0.9:1"], ["10.0.0.1:1"])
    everything = (await beats.beat(members.digest, state=READY)).members
    assert (everything.digest, everything.since, len(everything.addresses)) == (change.digest, b"", 4), "an older node"
    assert (await beats.beat(b"unknown", takes_changes=True, state=READY)).members == everything
    assert not (await beats.beat(change.digest, takes_changes=True, state=READY)).HasField("members")


async def test_a_node_whose_beats_stop_leaves_when_its_lease_runs_out(serving_at, eventually):
    async with serving_at(lease_s=0.5, tuning={"heartbeat_interval_s": 0.1}) as serving:
        watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
        await next_update(watch)
        grant = await serving.register("a")
        beats = Beats(serving, "a", grant.lease_id)
        for _ in range(8):
            await beats.beat(state=READY)
            await asyncio.sleep(0.1)
        assert await serving.node_ids() == ["a"], "beats kept it beyond one lease"
        beats.call.cancel()
        assert await serving.node_ids() == ["a"], "the end of the stream is not the end of the lease"
        seen = []
        while not seen or not seen[-1].delta.node_left:
            seen.append(await next_update(watch))
        assert seen[-1].delta.node_left == "a"
        assert await serving.node_ids() == []
        watch.cancel()


async def test_a_beat_without_a_lease_is_asked_to_register_again(serving):
    call = serving.stub.Heartbeat()
    await call.write(pb.HeartbeatRequest(node_id="a", lease_id="no"))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await asyncio.wait_for(call.read(), 10)
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert status.error_from_rpc(failure.value).reason == "LEASE_NOT_FOUND"


async def test_a_beat_that_says_nothing_renews(serving):
    grant = await serving.register("a")
    call = serving.stub.Heartbeat()
    await call.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id))
    answer, leader = await asyncio.wait_for(call.read(), 10), serving.control.leader
    assert answer == pb.HeartbeatResponse(plural=True, leader_epoch=1, leader_id=leader.leader_id)
    call.cancel()


async def test_a_deployment_reaches_the_node_with_its_heartbeat(serving, eventually):
    grant = await serving.register("a")
    beats = Beats(serving, "a", grant.lease_id)
    deployment = pb.Deployment(model="m", path="/models/m", replicas=1)
    deployment = (await serving.stub.DeployModel(pb.DeployModelRequest(deployment=deployment))).deployment
    assert deployment.revision == 1

    async def deployed():
        return (await beats.beat(state=READY)).deployment == deployment

    await eventually(deployed, "the deployment in a heartbeat's answer")
    await beats.beat(state=READY, model="m")
    (listed,) = (await serving.stub.ListDeployments(pb.ListDeploymentsRequest())).deployments
    assert (listed.deployment, list(listed.assigned_nodes), list(listed.ready_nodes)) == (deployment, ["a"], ["a"])
    await serving.stub.RemoveModel(pb.RemoveModelRequest(model="m"))

    async def released():
        return not (await beats.beat(state=READY, model="m")).HasField("deployment")

    await eventually(released, "an answer without deployment")
    assert not (await serving.stub.ListDeployments(pb.ListDeploymentsRequest())).deployments


async def test_a_deployment_is_stored_and_listed_with_its_bounds_and_a_node_is_told_what_it_serves(serving, eventually):
    limits = pb.RolloutLimits(max_unavailable=0, min_ready=Duration(seconds=5), progress=Duration(seconds=60), max_failed=0.5)
    wanted = pb.Deployment(model="m", path="/m", replicas=2, min_replicas=1, max_replicas=4, rollout=limits)
    stored = (await serving.stub.DeployModel(pb.DeployModelRequest(deployment=wanted, allow_outage=True))).deployment
    wanted.revision, wanted.rollout.allow_outage = 1, True
    assert stored == wanted
    (listed,) = (await serving.stub.ListDeployments(pb.ListDeploymentsRequest())).deployments
    assert (listed.deployment, listed.halted) == (wanted, False)
    beats = Beats(serving, "a", (await serving.register("a")).lease_id)

    async def told() -> bool:
        answer = await beats.beat(state=READY, model="m")
        return list(answer.deployments) == [pb.Deployment(model="m", path="/m", replicas=2, revision=1)]

    await eventually(told, "what it serves, without the bounds")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.stub.DeployModel(pb.DeployModelRequest(deployment=pb.Deployment(model="m"), rollback=True))
    assert status.error_from_rpc(failure.value).reason == "NO_EARLIER_REVISION"


async def test_a_drain_below_the_minimum_is_refused_over_the_wire_unless_it_is_asked_for(serving):
    await serving.stub.DeployModel(a_deployment(min_replicas=1))
    grant = await serving.register("a")
    await Beats(serving, "a", grant.lease_id).beat(state=READY, model="m")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.stub.DrainNode(pb.DrainNodeRequest(node_id="a"))
    error = status.error_from_rpc(failure.value)
    assert (failure.value.code(), error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BELOW_MIN_REPLICAS")
    assert (error.metadata["bound"], error.metadata["left"]) == ("1", "0")
    await serving.stub.DrainNode(pb.DrainNodeRequest(node_id="a", below_min=True))
    (node,) = (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes
    assert node.drain_requested


async def test_a_drain_request_reaches_the_node_and_the_watchers(serving):
    grant = await serving.register("a")
    beats = Beats(serving, "a", grant.lease_id)
    assert not (await beats.beat(state=READY)).drain
    await serving.stub.DrainNode(pb.DrainNodeRequest(node_id="a"))
    assert (await beats.beat(state=READY)).drain
    watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
    assert (await next_update(watch)).snapshot.nodes[0].drain_requested
    await serving.stub.UndrainNode(pb.UndrainNodeRequest(node_id="a"))
    assert not (await next_update(watch)).delta.node.drain_requested
    assert not (await beats.beat(state=READY)).drain
    watch.cancel()


async def test_a_node_that_leaves_is_gone_at_once(serving):
    grant = await serving.register("a")
    watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
    await next_update(watch)
    await serving.stub.LeaveNode(pb.LeaveNodeRequest(node_id="a", lease_id=grant.lease_id))
    assert (await next_update(watch)).delta.node_left == "a"
    assert await serving.node_ids() == []
    watch.cancel()


async def test_a_watcher_that_falls_behind_gets_a_new_snapshot(serving_at, make_node):
    async with serving_at(tuning={"watch_queue": 4}) as serving:
        watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
        assert (await next_update(watch)).snapshot.version == 0
        # In one turn of the server's loop, so that the stream cannot send in between.
        for i in range(10):
            serving.control.register(make_node(f"n{i}"))
        update = await next_update(watch)
        assert (update.WhichOneof("kind"), update.snapshot.version, len(update.snapshot.nodes)) == ("snapshot", 10, 10)
        await serving.register("one-more")
        assert (await next_update(watch)).delta.version == 11
        watch.cancel()


async def test_a_stopping_orchestrator_tells_its_watchers(serving):
    watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
    await next_update(watch)
    await serving.control.close()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await asyncio.wait_for(watch.read(), 10)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stopping_orchestrator_ends_the_beats(serving):
    grant = await serving.register("a")
    beats = Beats(serving, "a", grant.lease_id)
    await beats.beat(state=READY)
    await serving.control.close()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await beats.beat(state=READY)
    assert status.error_from_rpc(failure.value).reason == "STOPPING"


async def test_two_processes_with_one_name_do_not_evict_each_other(serving, code_of):
    await serving.register("a", incarnation="old")
    await serving.register("a", incarnation="new")
    node = pb.Node(node_id="a", address="h:1", incarnation="old", tp=1)
    call = serving.stub.RegisterNode(pb.RegisterNodeRequest(node=node))
    assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    (member,) = (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes
    assert member.incarnation == "new"
    joins = serving.telemetry.joins
    assert [joins.labels(kind)._value.get() for kind in ("joined", "renewed", "replaced")] == [1, 0, 1]


def a_node(**changes):
    fields = {"node_id": "a", "address": "127.0.0.1:1", "incarnation": "1", "tp": 1, **changes}
    return pb.RegisterNodeRequest(node=pb.Node(**fields))


def a_deployment(**changes):
    return pb.DeployModelRequest(deployment=pb.Deployment(**{"model": "m", "path": "/m", **changes}))


def limited(bounds=None, /, **limits):
    return a_deployment(rollout=pb.RolloutLimits(**limits), **(bounds or {}))


INVALID = [
    ("RegisterNode", pb.RegisterNodeRequest(), "node.node_id"),
    ("RegisterNode", a_node(node_id=""), "node.node_id"),
    ("RegisterNode", a_node(node_id="x" * 129), "node.node_id"),
    ("RegisterNode", a_node(node_id="two words"), "node.node_id"),
    ("RegisterNode", a_node(node_id="line\n"), "node.node_id"),
    ("RegisterNode", a_node(address=""), "node.address"),
    ("RegisterNode", a_node(address="host"), "node.address"),
    ("RegisterNode", a_node(address="host:0"), "node.address"),
    ("RegisterNode", a_node(address="host:65536"), "node.address"),
    ("RegisterNode", a_node(address="http://host:1"), "node.address"),
    ("RegisterNode", a_node(address="h" * 300 + ":1"), "node.address"),
    ("RegisterNode", a_node(incarnation=""), "node.incarnation"),
    ("RegisterNode", a_node(incarnation="x" * 129), "node.incarnation"),
    ("RegisterNode", a_node(host="h" * 254), "node.host"),
    ("RegisterNode", a_node(zone="z" * 254), "node.zone"),
    ("RegisterNode", a_node(tp=0), "node.tp"),
    ("RegisterNode", a_node(tp=2**32 - 1), "node.tp"),
    ("RegisterNode", a_node(model="m" * 129), "node.model"),
    ("DeployModel", pb.DeployModelRequest(), "deployment.model"),
    ("DeployModel", a_deployment(model="m" * 129), "deployment.model"),
    ("DeployModel", a_deployment(path=""), "deployment.path"),
    ("DeployModel", a_deployment(path="/" * 1025), "deployment.path"),
    ("DeployModel", a_deployment(path="/models/a\0b"), "deployment.path"),
    ("DeployModel", a_deployment(replicas=10_001), "deployment.replicas"),
    ("DeployModel", a_deployment(max_replicas=10_001), "deployment.max_replicas"),
    ("DeployModel", a_deployment(replicas=3, max_replicas=2), "deployment.max_replicas"),
    ("DeployModel", a_deployment(replicas=2, min_replicas=3), "deployment.min_replicas"),
    ("DeployModel", a_deployment(max_replicas=2, min_replicas=3), "deployment.min_replicas"),
    ("DeployModel", a_deployment(min_replicas=10_001), "deployment.min_replicas"),
    ("DeployModel", limited(max_unavailable=-0.1), "deployment.rollout.max_unavailable"),
    ("DeployModel", limited(max_unavailable=1.1), "deployment.rollout.max_unavailable"),
    ("DeployModel", limited(max_failed=float("nan")), "deployment.rollout.max_failed"),
    ("DeployModel", limited(min_ready=Duration(seconds=-1)), "deployment.rollout.min_ready"),
    ("DeployModel", limited(min_ready=Duration(seconds=3601)), "deployment.rollout.min_ready"),
    ("DeployModel", limited(progress=Duration()), "deployment.rollout.progress"),
    ("DeployModel", limited(progress=Duration(seconds=2**62)), "deployment.rollout.progress"),
    ("DeployModel", limited({"replicas": 2, "max_replicas": 2}, max_unavailable=0), "deployment.max_replicas"),
    ("DeployModel", pb.DeployModelRequest(rollback=True, idempotency_key="k" * 65), "idempotency_key"),
    ("DeployModel", pb.DeployModelRequest(rollback=True), "deployment.model"),
    ("DeployModel", a_deployment(idle_unload=Duration(seconds=-1)), "deployment.idle_unload"),
    ("DeployModel", a_deployment(idle_unload=Duration(seconds=30 * 86400 + 1)), "deployment.idle_unload"),
    ("DeployModel", a_deployment(idle_unload=Duration(seconds=2**62)), "deployment.idle_unload"),
    ("RegisterNode", a_node(models=[pb.ModelReport(model="m")] * 33), "node.models"),
    ("DrainNode", pb.DrainNodeRequest(), "node_id"),
    ("LeaveNode", pb.LeaveNodeRequest(node_id="\N{BULLET}"), "node_id"),
]


@pytest.mark.parametrize(("method", "request_", "field"), INVALID, ids=lambda value: str(value)[:40].replace("\n", " "))
async def test_a_bad_field_is_refused_by_name(serving, method, request_, field):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await getattr(serving.stub, method)(request_, timeout=10)
    error = status.error_from_rpc(failure.value)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
    assert await serving.node_ids() == []


async def test_a_newer_node_in_a_state_without_a_name_here_stays_a_member_that_is_not_ready(serving):
    grant = await serving.register("a")
    call = serving.stub.Heartbeat()
    for state in (READY, 17, READY):
        await call.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id, beat=worker_pb2.Beat(state=state)))
        await asyncio.wait_for(call.read(), 10)
        (node,) = (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes
        assert node.state == (READY if state == READY else worker_pb2.NODE_STATE_UNSPECIFIED)
    call.cancel()
    await serving.stub.RegisterNode(a_node(node_id="b", state=17), timeout=10)
    assert await serving.node_ids() == ["a", "b"]


LONG = "x" * 1025
BAD_BEATS = [
    ({"beat": worker_pb2.Beat(model="m" * 129)}, "beat.model"),
    ({"models": [pb.ModelReport(model=f"m{i}") for i in range(33)]}, "models"),
    ({"models": [pb.ModelReport(model="m")] * 2}, "models"),
    ({"models": [pb.ModelReport(model="m" * 129)]}, "models[0].model"),
    ({"models": [pb.ModelReport(path=LONG)]}, "models[0].path"),
    ({"models": [pb.ModelReport(), pb.ModelReport(model="m", reason=LONG)]}, "models[1].reason"),
    ({"models": [pb.ModelReport(next_reason=LONG)]}, "models[0].next_reason"),
    ({"models": [pb.ModelReport(model=f"m{i}", path="/" * 1024) for i in range(17)]}, "models"),
    ({"needs": [pb.ModelNeed(path="/m")] * 17}, "needs"),
    ({"needs": [pb.ModelNeed()]}, "needs[0].path"),
    ({"needs": [pb.ModelNeed(path="/m", error=LONG)]}, "needs[0].error"),
    ({"needs": [pb.ModelNeed(path="/m", bytes=2**63)]}, "needs[0].bytes"),
]


@pytest.mark.parametrize(("fields", "field"), BAD_BEATS, ids=lambda value: str(value)[:30].replace("\n", " "))
async def test_a_bad_beat_is_refused_by_name_and_the_node_stays(serving, fields, field):
    grant = await serving.register("a")
    call = serving.stub.Heartbeat()
    await call.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id, **fields))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await asyncio.wait_for(call.read(), 10)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in status.error_from_rpc(failure.value).violations] == [field]
    assert await serving.node_ids() == ["a"]


@pytest.mark.parametrize("address", ["node-0.workers.default.svc:50061", "[::1]:50061", "10.0.0.1:1", "a:65535"])
async def test_names_and_both_kinds_of_addresses_are_taken(serving, address):
    await serving.stub.RegisterNode(a_node(address=address), timeout=10)
    assert (await serving.stub.ListNodes(pb.ListNodesRequest())).nodes[0].address == address


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("DrainNode", pb.DrainNodeRequest(node_id="nobody")),
        ("LeaveNode", pb.LeaveNodeRequest(node_id="nobody", lease_id="x")),
        ("RemoveModel", pb.RemoveModelRequest(model="nothing")),
    ],
)
async def test_what_does_not_exist_is_not_found(serving, code_of, method, request_):
    assert await code_of(getattr(serving.stub, method)(request_, timeout=10)) is grpc.StatusCode.NOT_FOUND


async def test_a_full_cluster_says_so(serving_at, code_of):
    async with serving_at(tuning={"max_nodes": 1}) as serving:
        await serving.register("a")
        call = serving.stub.RegisterNode(a_node(node_id="b"), timeout=10)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_thousand_nodes_register_and_beat_over_one_server(serving_at, make_follower):
    """All messages are counted: 1,000 joins, 3,000 beats, and a watcher that hears of each join and of few loads."""
    async with (
        serving_at(tuning={"watch_queue": 65536, "load_updates_per_s": 10}, lease_s=60) as serving,
        open_channel(serving.address) as channel,
    ):
        watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
        await next_update(watch)
        stub = pb_grpc.OrchestratorServiceStub(channel)

        async def live(node_id):
            grant = await stub.RegisterNode(a_node(node_id=node_id), timeout=60)
            beats = Beats(serving, node_id, grant.lease_id)
            for running in range(3):
                await beats.beat(state=READY, load=worker_pb2.Load(running=running))
            await beats.call.done_writing()
            return await beats.call.code()

        codes = await asyncio.gather(*(live(f"n{i}") for i in range(1000)))
        assert set(codes) == {grpc.StatusCode.OK}
        assert len(await serving.node_ids()) == 1000
        assert serving.telemetry.beats._value.get() == 3000
        joins, states, versions = 0, 0, []
        while states < 1000:
            delta = (await next_update(watch)).delta
            versions.append(delta.version)
            joins += delta.node.state != READY
            states += delta.node.state == READY and delta.node.load.running == 0
        assert joins == 1000
        assert versions == list(range(1, len(versions) + 1))
        watch.cancel()


def test_what_several_watchers_are_sent_is_converted_once():
    messages, nodes = WatchMessages(), tuple(Node(f"n{number}", "h:1") for number in range(5))
    with patch.object(service, "node_to_wire", wraps=service.node_to_wire) as converted:
        change = NodeChanged(nodes[0])
        deltas = [messages.of(ClusterDelta(version, change), 1).delta for version in (5, 9, 2)]
        assert [(each.version, each.node.node_id) for each in deltas] == [(5, "n0"), (9, "n0"), (2, "n0")]
        assert converted.call_count == 1
        for version, count in ((7, 6), (7, 6), (8, 11)):
            message = messages.of(Snapshot("e", version, ClusterState(nodes, ())), 1)
            message.leader_epoch = version  # a caller's change is not the next one's
            assert [node.node_id for node in message.snapshot.nodes] == [node.node_id for node in nodes]
            assert converted.call_count == count
        assert messages.of(Snapshot("other", 8, ClusterState(nodes[:1], ())), 1).snapshot.epoch == "other"
        # One that leads again counts from the beginning, and knows other nodes.
        assert len(messages.of(Snapshot("other", 8, ClusterState(nodes[1:3], ())), 2).snapshot.nodes) == 2


def test_changes_that_are_over_are_not_taken_for_new_ones_in_their_place():
    messages = WatchMessages()
    for number in range(2000):  # an identity comes again when what had it is gone
        assert messages.of(ClusterDelta(1, NodeLeft(f"n{number}")), 1).delta.node_left == f"n{number}"
