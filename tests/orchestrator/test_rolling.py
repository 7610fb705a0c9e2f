"""New revisions and measurements, through the control plane, with nodes that answer as real ones do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.orchestrator.fleet import FAILED, READY, SIZES, STARTING, FakeNode, Fleet, restored

from ryzanstein.cluster import Beat, Deployment, ModelReport, Node, NodeReport
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.orchestrator.deploying.model_deployments import DeployOptions


@pytest.fixture
def path(tmp_path):
    return tmp_path / "o.sqlite"


async def test_only_files_that_are_to_be_loaded_make_a_new_revision(path):
    async with restored(path) as control:
        steps = [
            (Deployment("m", "/m", 1), False, 1, ""),
            (Deployment("m", "/m", 1), False, 1, ""),
            (Deployment("m", "/m", 2, idle_unload_s=60), False, 1, ""),
            (Deployment("m", "/m", 2), True, 2, ""),
            (Deployment("m", "/new", 2), False, 3, "/m"),
            (Deployment("m", "/new", 2), True, 4, "/m"),
        ]
        for deployment, reload, revision, earlier in steps:
            assert await control.deploy(deployment, DeployOptions(reload)) == replace(
                deployment, revision=revision, earlier_path=earlier
            )
    async with restored(path) as control:
        assert control.deployments()[0].deployment.revision == 4
        assert (await control.deploy(Deployment("m", "/m", 2))).revision == 5
        await control.remove("m")
        assert (await control.deploy(Deployment("m", "/other"))).revision == 6, "nodes may still report 5"


async def test_nodes_change_one_after_the_other(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m"))
        assert fleet.revisions() == [1, 1, 1], "nothing is replaced: all at once"
        fleet.load()
        await fleet.deploy(Deployment("m", "/new"))
        assert fleet.status().outdated_nodes == ("a", "b", "c")
        assert control._telemetry.outdated.labels("m")._value.get() == 3
        for done in range(3):
            assert fleet.revisions() == [2] * (done + 1) + [1] * (2 - done)
            assert [node.assigned["m"].path for node in fleet.nodes] == ["/new"] * (done + 1) + ["/m"] * (2 - done)
            turn = fleet.nodes[done]
            turn.models["m"] = replace(turn.models["m"], path="/new", revision=2, state=STARTING)
            fleet.round()
            assert fleet.revisions() == [2] * (done + 1) + [1] * (2 - done), "it is not ready yet"
            assert fleet.status().ready_nodes == tuple("abc"[:done])
            turn.load()
            fleet.round()
        assert (fleet.status().ready_nodes, fleet.status().outdated_nodes) == (("a", "b", "c"), ())


async def test_a_roll_stops_where_the_new_revision_fails(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m"))
        fleet.load()
        await fleet.deploy(Deployment("m", "/new"))
        first = fleet.nodes[0]
        first.models["m"] = replace(first.models["m"], next_revision=2, next_state=FAILED, next_reason="shape mismatch")
        for _ in range(3):
            fleet.round()
        assert fleet.revisions()[1:] == [1, 1]
        status = fleet.status()
        assert status.outdated_nodes == ("a", "b", "c")
        assert [(each.node_id, each.reason) for each in status.shortages] == [("a", "failed lately: shape mismatch")]
        await fleet.deploy(Deployment("m", "/m"))
        assert sorted(fleet.revisions()) == [1, 1, 3], "another revision is another roll"


async def test_a_roll_goes_on_after_a_restart_and_without_nodes_that_leave_or_drain(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", "c", "d", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m"))
        fleet.load()
        await fleet.deploy(Deployment("m", "/new"))
        fleet.load()
        assert fleet.revisions() == [2, 2, 1, 1]
        await control.close()
    b = fleet.nodes[1]
    b.models["m"] = replace(b.models["m"], next_revision=2, next_state=STARTING)
    async with restored(path) as control:
        a, b, c, d = fleet.nodes
        a.join(control)
        assert a.assigned["m"].revision == 2, "what it has, while the others are not back"
        d.join(control)
        assert (d.assigned["m"].path, d.assigned["m"].revision) == ("/m", 1)
        fleet.join(control)
        fleet.round()
        assert fleet.revisions() == [2, 2, 1, 1], "the node that had begun goes on"
        await control.drain("b")
        fleet.round()
        assert fleet.revisions() == [2, None, 1, 1], "it may not have heard of it yet"
        for _ in range(3):
            fleet.round()
        assert fleet.revisions() == [2, None, 2, 1]
        control.leave("c", c.lease_id)
        fleet.nodes.remove(c)
        fleet.round()
        assert fleet.revisions() == [2, None, 2]


async def test_a_model_of_that_name_that_a_node_was_started_with_is_replaced_in_its_turn(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES)
        for node in fleet.nodes:
            node.models["m"] = ModelReport("m", "/m", 0, READY, memory_bytes=10, started_with=True)
        fleet.round()
        await fleet.deploy(Deployment("m", "/new"))
        assert fleet.revisions() == [1, 0]
        fleet.load()
        assert fleet.revisions() == [1, 1]


async def test_a_new_replica_has_the_new_revision_at_once(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m"))
        fleet.load()
        await fleet.deploy(Deployment("m", "/new"))
        late = FakeNode("late", SIZES)
        fleet.nodes.append(late)
        late.join(control)
        for _ in range(2):
            fleet.round()
        assert fleet.revisions() == [2, 1, 2]


async def test_older_nodes_change_one_after_the_other_by_their_paths(path):
    async with restored(path) as control:
        nodes = {name: control.register(Node(name, "h:1", "1")).lease_id for name in "ab"}

        def beat(sequence):
            control.tick()
            report = NodeReport(Beat(sequence, READY, "m"))
            return {name: control.beat(name, lease, report).deployments[0].path for name, lease in nodes.items()}

        await control.deploy(Deployment("m", "/m"))
        assert beat(1) == {"a": "/m", "b": "/m"}
        await control.deploy(Deployment("m", "/new"))
        assert [beat(2), beat(3)][1] == {"a": "/new", "b": "/m"}
        # The clock of the control plane is a real one; the wait for an older node is moved instead.
        assigned = control._reconciler._rolling._told
        assigned["a", "m"] = replace(assigned["a", "m"], since=assigned["a", "m"].since - 10)
        assert [beat(4), beat(5)][1] == {"a": "/new", "b": "/new"}


async def test_a_deployment_that_fits_on_no_node_is_refused_and_not_stored(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", "b", sizes=SIZES)
        with pytest.raises(RyzansteinError) as failure:
            await fleet.deploy(Deployment("m", "/huge", 1))
        error = failure.value
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "MODEL_DOES_NOT_FIT")
        assert error.metadata == {"a": "400", "b": "400"}
        assert "a: needs" in error.message
        assert control.deployments() == []
        with pytest.raises(RyzansteinError) as failure:
            await fleet.deploy(Deployment("m", "/bad", 1))
        assert (failure.value.code, failure.value.reason) == (Code.FAILED_PRECONDITION, "MODEL_REFUSED")
        assert "no config.json" in failure.value.message
        fleet.nodes[0].sizes = {**SIZES, "/bad": 5}  # repaired: what was an error is asked again
        assert (await fleet.deploy(Deployment("m", "/bad", 1))).revision == 1


async def test_the_new_directory_of_a_deployment_is_measured_too_and_the_old_one_stays_in_force(path):
    async with restored(path) as control:
        fleet = Fleet(control, "a", sizes=SIZES)
        await fleet.deploy(Deployment("m", "/m"))
        fleet.load()
        with pytest.raises(RyzansteinError, match="no node can serve"):
            await fleet.deploy(Deployment("m", "/huge"))
        assert (fleet.status().deployment.path, fleet.revisions()) == ("/m", [1])


async def test_with_an_older_node_or_without_answers_a_deployment_is_accepted(path, monkeypatch):
    monkeypatch.setattr("ryzanstein.orchestrator.control._MEASURE_S", 0.0)
    async with restored(path, tuning={"heartbeat_interval_s": 0.01}) as control:
        fleet = Fleet(control, "a", sizes={})
        assert (await fleet.deploy(Deployment("m", "/unknown"))).revision == 1
        fleet.nodes[0].sizes = {"/huge": 500}
        Fleet(control, "older", sizes={}, plural=False)
        assert (await fleet.deploy(Deployment("n", "/huge"))).revision == 1


async def test_other_writes_go_on_while_a_directory_is_measured_and_cancelling_leaves_nothing(path):
    async with restored(path) as control:
        Fleet(control, "silent", sizes={})
        call = asyncio.create_task(control.deploy(Deployment("m", "/m")))
        await asyncio.sleep(0.01)
        await asyncio.wait_for(control.drain("silent"), 2)
        await control.undrain("silent")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert control.deployments() == []
        assert control._needs._awaited == {}


async def test_a_node_is_asked_for_what_is_not_known_16_at_a_time_and_for_errors_again(path, monkeypatch):
    async with restored(path) as control:
        for number in range(20):
            await control.deploy(Deployment(f"m{number:02}", f"/m{number:02}", 1))
        node = FakeNode("a", {f"/m{number:02}": 1 for number in range(19)} | {"/m19": "not there"})
        node.join(control)
        assert len(node.asked) == 16
        node.beat(control)
        assert node.asked == ("/m16", "/m17", "/m18", "/m19")
        node.beat(control)
        assert node.asked == ()
        control.tick()
        node.beat(control)
        assert len(node.assigned) == 19
        monkeypatch.setattr("ryzanstein.orchestrator.placing.needs.ASK_AGAIN_S", 0.0)
        node.sizes["/m19"] = 1
        for _ in range(3):
            node.beat(control)
        control.tick()
        node.beat(control)
        assert len(node.assigned) == 20
