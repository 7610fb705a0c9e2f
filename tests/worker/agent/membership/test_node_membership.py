"""The node's membership against a small orchestrator that can be killed and that forgets."""

import asyncio
import socket

import grpc
import pytest
from structlog.testing import capture_logs
from tests.worker.small_orchestrator import SmallOrchestrator

from ryzanstein.cluster import (
    Beat,
    Deployment,
    Instruction,
    Load,
    MemberAddresses,
    ModelNeed,
    ModelReport,
    Node,
    NodeReport,
    NodeState,
)
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.wire.membership import instruction_to_wire
from ryzanstein.worker.agent.membership.node_membership import NodeMembership
from ryzanstein.worker.agent.membership.obedience import LateAnswers
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics


class Member:
    """A node that has nothing to do."""

    def __init__(self) -> None:
        self.desired: asyncio.Queue = asyncio.Queue()
        self.known = KnownNodes(lambda cause: None)

    async def locate(self) -> None:
        """It has always known its address."""

    def describe(self) -> Node:
        return Node("node-t", "127.0.0.1:7", "incarnation-t", 2, NodeState.READY, "demo")

    def report(self) -> NodeReport:
        beat = Beat(1, NodeState.READY, "demo", 2048, Load(running=3))
        models = (ModelReport("demo", "/demo", 2, NodeState.READY, memory_bytes=5, asleep=True, content="c1"),)
        needs = (ModelNeed("/m", 3), ModelNeed("/n", error="no such file"))
        return NodeReport(beat, models, 7, needs, self.known.digest)

    def follow(self, instruction: Instruction) -> None:
        self.desired.put_nowait(instruction)

    async def wanted(self, timeout_s: float) -> None:
        await self.known.asked(timeout_s)

    async def until(self, desired) -> None:
        async with asyncio.timeout(10):
            while await self.desired.get() != desired:
                pass


@pytest.fixture
async def orchestrator():
    servicer = SmallOrchestrator()
    await servicer.serve()
    yield servicer
    await servicer.server.stop(0)


@pytest.fixture
async def member(orchestrator):
    member = Member()
    member.telemetry = NodeMetrics()
    member.membership = NodeMembership(f"127.0.0.1:{orchestrator.server.port}", member, member.telemetry)
    task = asyncio.create_task(member.membership.run())
    yield member
    task.cancel()
    await asyncio.wait([task])


async def test_a_node_registers_and_beats(orchestrator, member):
    beat = await orchestrator.next_beat()
    assert (orchestrator.nodes[0].node_id, orchestrator.nodes[0].tp) == ("node-t", 2)
    assert (beat.node_id, beat.lease_id, beat.beat.load.running) == ("node-t", "lease-1", 3)
    assert (beat.models[0].model, beat.models[0].revision, beat.models[0].asleep, beat.memory_bytes) == ("demo", 2, True, 7)
    assert beat.models[0].content == "c1"
    assert [(need.path, need.bytes, need.error) for need in beat.needs] == [("/m", 3, ""), ("/n", 0, "no such file")]
    await orchestrator.next_beat()


async def test_a_node_that_waits_for_an_address_beats_at_once(orchestrator, member):
    orchestrator.interval_ms = 60_000  # it has not registered yet
    member.known.follow(MemberAddresses(b"1", ("127.0.0.1:1",)))
    assert (await orchestrator.next_beat()).members_digest == b"1"
    waiting = asyncio.create_task(member.known.check("127.0.0.1:2"))
    await orchestrator.next_beat()
    member.known.follow(MemberAddresses(b"2", ("127.0.0.1:2",)))
    await waiting


async def test_what_the_orchestrator_wants_reaches_the_node(orchestrator, member):
    await member.until(Instruction(plural=False))
    orchestrator.answer = pb.HeartbeatResponse(deployment=pb.Deployment(model="m", path="/m"), drain=True)
    await member.until(Instruction((Deployment("m", "/m"),), drain=True, plural=False))
    wanted = Instruction((Deployment("m", "/m", 2, 1), Deployment("n", "/n", 0, 4, 60.0)), measure_paths=("/m", "/n"))
    orchestrator.answer = instruction_to_wire(wanted)
    await member.until(wanted)


async def test_a_forgotten_lease_is_taken_anew(orchestrator, member):
    await orchestrator.next_beat()
    orchestrator.leases += 1  # ours is void now
    while (await orchestrator.next_beat()).lease_id != "lease-3":
        pass
    page = member.telemetry.registry.get_sample_value("ryzanstein_worker_orchestrator_losses_total", {"cause": "not_found"})
    assert page == 1


async def test_a_restarted_orchestrator_is_found_again(orchestrator, member):
    await orchestrator.next_beat()
    port = orchestrator.server.port
    await orchestrator.server.stop(0)
    await asyncio.sleep(0.3)
    while not orchestrator.beats.empty():
        orchestrator.beats.get_nowait()
    await orchestrator.serve(port)
    assert (await orchestrator.next_beat()).lease_id == "lease-2"


async def test_a_beat_that_cannot_be_made_does_not_end_the_membership(orchestrator, member, monkeypatch):
    await orchestrator.next_beat()

    def broken() -> NodeReport:
        raise ValueError("no ranks to look at")

    monkeypatch.setattr(member, "report", broken)
    labels = {"cause": "failed"}
    async with asyncio.timeout(10):
        while not member.telemetry.registry.get_sample_value("ryzanstein_worker_orchestrator_losses_total", labels):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    monkeypatch.undo()
    while (beat := await orchestrator.next_beat()).lease_id == "lease-1":
        pass
    assert beat.beat.load.running == 3, "it registered again and reports as before"


async def test_leaving_gives_the_lease_back(orchestrator, member):
    await orchestrator.next_beat()
    await member.membership.leave()
    assert orchestrator.left == [("node-t", "lease-1")]


async def test_leaving_a_dead_orchestrator_takes_no_time():
    """One whose port is closed, and one that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as lines:
        for port in (1, silent.getsockname()[1]):
            membership = NodeMembership(f"127.0.0.1:{port}", Member(), NodeMetrics())
            membership._lease_id = "lease-1"
            async with asyncio.timeout(3):
                await membership.leave()
    assert [line["cause"] for line in lines] == ["UNAVAILABLE", "DEADLINE_EXCEEDED"]


@pytest.mark.cluster
@pytest.mark.long
async def test_a_node_obeys_its_orchestrator_from_joining_to_leaving(orchestrator, start_node, demo_dir):
    """Becomes ready, drains and takes work again, changes over to a deployed model, goes back, and leaves on SIGTERM."""
    node = start_node("--orchestrator", f"127.0.0.1:{orchestrator.server.port}", "--node-zone", "z1", tp=1)
    ready = await beat_with(orchestrator, NodeState.READY, "demo")
    assert len(ready.models[0].content) >= 16, "what the ranks read"
    assert orchestrator.nodes[0].address == node.address
    assert (orchestrator.nodes[0].host, orchestrator.nodes[0].zone) == (socket.gethostname(), "z1")
    orchestrator.answer = pb.HeartbeatResponse(drain=True)
    await beat_with(orchestrator, NodeState.DRAINING, "demo")
    orchestrator.answer = pb.HeartbeatResponse()
    await beat_with(orchestrator, NodeState.READY, "demo")
    orchestrator.answer = pb.HeartbeatResponse(deployment=pb.Deployment(model="renamed", path=str(demo_dir)))
    await beat_with(orchestrator, NodeState.READY, "renamed")
    orchestrator.answer = pb.HeartbeatResponse()
    await beat_with(orchestrator, NodeState.READY, "demo")
    node.process.terminate()
    assert await asyncio.to_thread(node.process.wait, 20) == 0
    assert orchestrator.left == [("node-t", "lease-1")]


async def beat_with(orchestrator, state: NodeState, model: str) -> pb.HeartbeatRequest:
    async with asyncio.timeout(60):
        while True:
            request = await orchestrator.beats.get()
            if (request.beat.state, request.beat.model) == (state, model):
                return request


async def test_a_missing_orchestrator_is_asked_again_and_again():
    membership = NodeMembership("127.0.0.1:1", Member(), NodeMetrics())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(membership.run(), 1.0)
    labels = {"cause": grpc.StatusCode.UNAVAILABLE.name.lower()}
    losses = membership._metrics.registry.get_sample_value("ryzanstein_worker_orchestrator_losses_total", labels)
    assert losses >= 2


async def test_a_leader_of_an_earlier_epoch_is_refused_and_told_what_is_known(orchestrator, member):
    orchestrator.leader = (5, "b")
    await member.until(Instruction(plural=False))
    while (await orchestrator.next_beat()).sequence < 2:
        pass
    for stale in ((4, "a"), (5, "a")):
        orchestrator.leader = stale
        refused = losses(member, "stale_leader")
        orchestrator.known.clear()
        orchestrator.answer = pb.HeartbeatResponse(drain=True)
        async with asyncio.timeout(10):
            while losses(member, "stale_leader") < refused + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert set(orchestrator.known) == {(5, "b")}
    given = [member.desired.get_nowait() for _ in range(member.desired.qsize())]
    assert not any(instruction.drain for instruction in given)
    orchestrator.leader = (6, "a")
    await member.until(Instruction(drain=True, plural=False))
    orchestrator.leader = (0, "")
    orchestrator.answer = pb.HeartbeatResponse()
    await member.until(Instruction(plural=False))


def losses(member, cause: str) -> float:
    return member.telemetry.registry.get_sample_value("ryzanstein_worker_orchestrator_losses_total", {"cause": cause})


async def test_an_answer_to_nothing_that_was_asked_is_dropped(orchestrator, member):
    orchestrator.answers_by = lambda sequence: sequence + 1000
    orchestrator.answer = pb.HeartbeatResponse(drain=True)
    await orchestrator.next_beat()
    async with asyncio.timeout(10):
        while not member.telemetry.registry.get_sample_value("ryzanstein_worker_late_instructions_total"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert member.desired.empty()


def test_an_answer_is_void_three_seconds_after_its_beat_was_made():
    clock = [0.0]
    late = LateAnswers(lambda: clock[0])
    first = late.sent()
    clock[0] = 2.0
    second = late.sent()
    assert not late.are_void(0), "an older orchestrator does not say what it answers"
    clock[0] = 3.1
    assert late.are_void(first)
    assert not late.are_void(second)
    assert late.are_void(second), "the second answer to one beat"
    assert late.are_void(99)
    for _ in range(5000):
        late.sent()
    assert len(late._sent) <= 1024
