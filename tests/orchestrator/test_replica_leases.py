"""A model that comes no further on a node has failed there, however well the node's agent beats."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from tests.orchestrator.fleet import READY, SIZES, STARTING, Fleet, Simulated, restored

from ryzanstein.cluster import Beat, Deployment, ModelReport, Node, NodeReport
from ryzanstein.orchestrator.placing.replicas.replica_leases import ReplicaLeases
from ryzanstein.orchestrator.placing.rollout_bounds import RolloutBounds

M = Deployment("m", "/m", 1, 1)
LEASE_S, GAP_S = 10.0, 2.0


class Watched:
    """One node that reports every second, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.leases = ReplicaLeases(lambda: self.now, LEASE_S, GAP_S)
        self.node = Node("a", "h:1", "first")

    def report(self, number: int | None, *, told: Deployment = M, after_s: float = 1.0) -> bool:
        """Whether the replica expires by this report."""
        self.now += after_s
        return self.leases.reported(self.node, {} if number is None else {"m": number}, [told]) == [told]


def test_a_start_that_stands_still_for_a_lease_expires_once():
    watched = Watched()
    assert [watched.report(7) for _ in range(13)] == [False] * 10 + [True] + [False] * 2
    assert watched.leases.reason(watched.node, M) == "its start showed no progress for 10 s"
    assert not watched.report(8), "it moves again"
    assert watched.leases.reason(watched.node, M) is None


def test_a_start_that_moves_now_and_then_never_expires():
    watched = Watched()
    assert not any(watched.report(second // 9) for second in range(200))


@pytest.mark.parametrize("ends", ["it is not listed", "a new process of the node", "another revision", "the node left"])
def test_what_begins_anew_has_a_whole_lease_again(ends: str):
    watched, told = Watched(), M
    for _ in range(10):
        assert not watched.report(7)
    if ends == "it is not listed":
        watched.report(None)
    elif ends == "a new process of the node":
        watched.node = replace(watched.node, incarnation="second")
    elif ends == "another revision":
        told = replace(M, revision=2)
    else:
        watched.leases.forget("a")
    assert [watched.report(7, told=told) for _ in range(11)] == [False] * 10 + [True]


def test_time_without_reports_does_not_count():
    watched = Watched()
    assert not any(watched.report(7, after_s=100.0) for _ in range(5)), "four gaps count for two seconds each"
    assert [watched.report(7) for _ in range(2)] == [False, True]


def stuck(deployment: Deployment) -> ModelReport:
    return ModelReport("m", deployment.path, deployment.revision, STARTING, reason="loading m", memory_bytes=10)


def begun(*names: str, told: Deployment = M) -> tuple[Simulated, Fleet]:
    """A cluster whose first assigned node has begun to load."""
    cluster = Simulated(told, bounds=RolloutBounds(min_ready_s=0.0))
    fleet = Fleet(cluster, *names, sizes=SIZES)
    for _ in range(3):
        fleet.round()
    for node in fleet.nodes:
        node.models = {name: stuck(deployment) for name, deployment in node.assigned.items()}
        node.starts = dict.fromkeys(node.assigned, 1)
    return cluster, fleet


def pass_s(cluster: Simulated, fleet: Fleet, seconds: int) -> None:
    for _ in range(seconds):
        cluster.now += 1.0
        fleet.round()


def holder(fleet: Fleet) -> list[str]:
    return [node.node_id for node in fleet.nodes if "m" in node.assigned]


def short(cluster: Simulated) -> float:
    return cluster.reconciler._telemetry.short.labels("m")._value.get()


def status(cluster: Simulated):
    (found,) = cluster.reconciler.status()
    return found


def test_an_expired_replica_is_placed_elsewhere_refused_there_for_ten_minutes_and_the_reason_is_told():
    cluster, fleet = begun("a", "b")
    (first,) = holder(fleet)
    pass_s(cluster, fleet, 599)
    assert holder(fleet) == [first]
    with capture_logs() as logs:
        pass_s(cluster, fleet, 3)
    (other,) = holder(fleet)
    assert other != first
    (line,) = [line for line in logs if line["event"] == "replica expired"]
    assert (line["node_id"], line["model"], line["doing"]) == (first, "m", "loading m")
    reasons = {each.node_id: each.reason for each in status(cluster).shortages}
    assert reasons == {first: "failed lately: its start showed no progress for 600 s"}
    assert cluster.reconciler._telemetry.replicas_expired._value.get() == 1
    stuck_node, well = sorted(fleet.nodes, key=lambda node: node.node_id != first)
    stuck_node.models, stuck_node.starts = {}, {}
    well.load()
    pass_s(cluster, fleet, 300)
    assert holder(fleet) == [other]
    fleet.nodes.remove(well)
    cluster.registry.leave(other, well.lease_id)
    pass_s(cluster, fleet, 3)
    assert holder(fleet) == [first], "it is the last resort"


def test_where_there_is_no_room_elsewhere_it_stays_and_serves_when_it_is_ready_after_all():
    cluster, fleet = begun("a")
    assert short(cluster) == 0
    pass_s(cluster, fleet, 1300)
    assert (holder(fleet), short(cluster)) == (["a"], 1)
    assert [each.node_id for each in status(cluster).shortages] == ["a"], "also long after the refusal would have ended"
    assert cluster.reconciler._telemetry.replicas_expired._value.get() == 1
    fleet.nodes[0].starts = {}
    fleet.load()
    pass_s(cluster, fleet, 2)
    assert (status(cluster).ready_nodes, status(cluster).shortages, short(cluster)) == (("a",), (), 0)


def test_a_node_that_says_nothing_of_starts_is_an_older_one_and_never_expires():
    cluster, fleet = begun("a", "b")
    before = holder(fleet)
    for node in fleet.nodes:
        node.starts = {}
    pass_s(cluster, fleet, 1300)
    assert holder(fleet) == before
    assert status(cluster).shortages == ()


def test_a_new_leader_waits_for_a_whole_lease_that_it_has_seen_itself():
    cluster, fleet = begun("a", "b")
    before = holder(fleet)
    pass_s(cluster, fleet, 590)
    cluster.restart()
    pass_s(cluster, fleet, 590)
    assert holder(fleet) == before
    pass_s(cluster, fleet, 15)
    assert holder(fleet) != before


def test_a_node_that_waits_for_its_turn_is_not_asked_for_the_new_revision():
    told = Deployment("m", "/m", 2, 1)
    cluster, fleet = begun("a", "b", told=told)
    fleet.load()
    cluster.catalog.put(replace(told, path="/new", revision=2))
    pass_s(cluster, fleet, 2)
    waiting = next(node for node in fleet.nodes if node.assigned["m"].revision == 1)
    fleet.nodes = [waiting]
    waiting.starts = {"m": 1}
    pass_s(cluster, fleet, 700)
    assert status(cluster).shortages == ()
    assert waiting.assigned["m"].revision == 1


async def test_a_refusal_of_an_expired_replica_outlives_the_orchestrator(tmp_path):
    path, now = tmp_path / "o.sqlite", 0.0
    async with restored(path) as control:
        control._reconciler._leases = ReplicaLeases(lambda: now, LEASE_S, GAP_S)
        lease = control.register(Node("a", "h:1", "1")).lease_id
        stored = await control.deploy(Deployment("m", "/m", 1))
        for sequence in range(1, 20):
            report = NodeReport(Beat(sequence, READY), (stuck(stored),), 100, starts={"m": 3})
            control.beat("a", lease, report)
            control.tick()
            now += 1.0
        await control.close()
    async with restored(path) as control:
        (left,) = await control._store.refusals()
        assert (left.node_id, left.model, left.reason) == ("a", "m", "its start showed no progress for 10 s")
