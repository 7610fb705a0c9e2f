"""The epoch of the leader, as nodes and routers see it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.orchestrator.leading.term import MOST_AHEAD
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.worker_pb2 import Beat


def test_which_leader_may_be_followed_after_which():
    known = LeaderEpoch(5, "b")
    stale = [each for epoch in range(7) for each in map(LeaderEpoch, [epoch] * 3, "abc") if each.is_stale_after(known)]
    assert stale == [LeaderEpoch(epoch, name) for epoch in range(1, 5) for name in "abc"] + [
        LeaderEpoch(5, "a"),
        LeaderEpoch(5, "c"),
    ]
    assert not LeaderEpoch(1, "a").is_stale_after(LeaderEpoch())


async def test_each_start_is_another_epoch_that_every_answer_carries(serving_at):
    seen = []
    for _ in range(3):
        async with serving_at() as serving:
            grant = await serving.register("a")
            beats = serving.stub.Heartbeat()
            await beats.write(pb.HeartbeatRequest(node_id="a", lease_id=grant.lease_id, beat=Beat(sequence=9), sequence=7))
            answer = await asyncio.wait_for(beats.read(), 10)
            watch = serving.stub.WatchCluster(pb.WatchClusterRequest())
            snapshot = await asyncio.wait_for(watch.read(), 10)
            assert answer.sequence == 7
            leaders = {(each.leader_epoch, each.leader_id) for each in (grant, answer, snapshot)}
            assert leaders == {(grant.leader_epoch, snapshot.snapshot.epoch)}
            seen.append(grant.leader_epoch)
            beats.cancel()
            watch.cancel()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("peer", ["node", "router"])
async def test_an_orchestrator_that_lost_its_store_raises_its_epoch_above_what_peers_know(serving_at, peer):
    async with serving_at() as serving:
        own = serving.control.leader
        if peer == "node":
            node = pb.Node(node_id="a", address="127.0.0.1:1", incarnation="i", tp=1)
            request = pb.RegisterNodeRequest(node=node, known_epoch=own.epoch, known_leader_id="another")
            assert (await serving.stub.RegisterNode(request)).leader_epoch == own.epoch + 1
            request.known_epoch = 41
            assert (await serving.stub.RegisterNode(request)).leader_epoch == 42
        watch = serving.stub.WatchCluster(pb.WatchClusterRequest(known_epoch=41, known_leader_id="another"))
        assert (await asyncio.wait_for(watch.read(), 10)).leader_epoch == 42
        watch.cancel()
        assert serving.telemetry.registry.get_sample_value("ryzanstein_orchestrator_epoch") == 42
    async with serving_at() as serving:
        assert serving.control.leader.epoch == 43


async def test_no_peer_can_use_up_the_epochs(serving):
    node = pb.Node(node_id="a", address="127.0.0.1:1", incarnation="i", tp=1)
    request = pb.RegisterNodeRequest(node=node, known_epoch=serving.control.leader.epoch + MOST_AHEAD + 1)
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await serving.stub.RegisterNode(request)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert serving.control.leader.epoch == 1
