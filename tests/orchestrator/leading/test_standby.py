"""Two orchestrator processes with a real Redis, and nodes and routers that follow the leader."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager

import pytest

from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cluster import Beat, Instruction, Load, ModelNeed, ModelReport, Node, NodeReport, NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.leaders.epochs import LeaderEpoch
from ryzanstein.router.membership.cache import ViewCache
from ryzanstein.router.membership.view import ClusterView
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.client import PLAIN
from ryzanstein.rpc.status import answered
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2_grpc as pb_grpc
from ryzanstein.worker.agent.membership.node_membership import NodeMembership
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics

LIMIT_S = 15.0
"""It is 4 to 8 s on a machine that has nothing else to do."""

pytestmark = [pytest.mark.cluster]

ORCHESTRATOR = Peer(PeerRole.ORCHESTRATOR)


class Orchestrators:
    """Two processes, by address."""

    def __init__(self, redis_url: str) -> None:
        self._url = redis_url
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._reading: list[asyncio.Task] = []
        self.logs: dict[str, list[dict]] = {}

    @property
    def addresses(self) -> str:
        return ",".join(self.processes)

    async def start(self, port: int = 0) -> str:
        if not port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        address = f"127.0.0.1:{port}"
        flags = ["--store", "redis", "--leader-election", "redis", "--redis-url", self._url, "--advertise-address", address]
        program = (sys.executable, "-m", "ryzanstein.orchestrator", "--grpc-port", str(port), "--metrics-port", "0", *flags)
        self.processes[address] = child = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.PIPE)
        self.logs[address] = []
        self._reading.append(asyncio.create_task(self._read(child, self.logs[address])))
        async with asyncio.timeout(30):
            while not any(line.get("event") == "serving" for line in self.logs[address]):
                assert child.returncode is None, self.logs[address]
                await asyncio.sleep(0.02)
        return address

    async def _read(self, child, log) -> None:
        while line := await child.stderr.readline():
            log.append(json.loads(line))

    async def leader(self, but: str = "", within_s: float = 20) -> str:
        """The address of the one that leads."""
        async with asyncio.timeout(within_s):
            while True:
                for address in self.processes:
                    if address != but and await self.leads(address):
                        return address
                await asyncio.sleep(0.05)

    async def leads(self, address: str) -> bool:
        async with PLAIN.open(address, ORCHESTRATOR, retries=False) as channel:
            try:
                await answered(pb_grpc.OrchestratorServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=0.5))
            except RyzansteinError:
                return False
        return True

    async def close(self) -> None:
        for child in self.processes.values():
            if child.returncode is None:
                child.kill()
            await child.wait()
        await asyncio.gather(*self._reading)


@pytest.fixture
async def orchestrators(start_redis):
    server = await start_redis()
    made = Orchestrators(server.url)
    made.redis = server
    await made.start()
    await made.start()
    yield made
    await made.close()


class Follower:
    """A node with the real membership client. It serves what it is told at once."""

    def __init__(self, node_id: str, addresses: str) -> None:
        self.node_id = node_id
        self.instructions: list[tuple[float, LeaderEpoch, Instruction]] = []
        self.membership = NodeMembership(addresses, self, NodeMetrics())
        self._models: tuple[ModelReport, ...] = ()
        self._sequence = 0
        self._measured: tuple[str, ...] = ()

    async def locate(self) -> None:
        """It is at a fixed address."""

    def describe(self) -> Node:
        return Node(self.node_id, f"{self.node_id}:1", "i", 1, NodeState.READY, models=self._models, memory_bytes=2**40)

    def report(self) -> NodeReport:
        self._sequence += 1
        needs = tuple(ModelNeed(path, 1) for path in self._measured)
        return NodeReport(Beat(self._sequence, NodeState.READY, "", 0, Load()), self._models, 2**40, needs)

    def follow(self, instruction: Instruction) -> None:
        self.instructions.append((time.monotonic(), self.membership._leader.latest, instruction))
        self._measured = instruction.measure_paths
        self._models = tuple(
            ModelReport(each.model, each.path, each.revision, NodeState.READY) for each in instruction.deployments
        )

    async def wanted(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.2))


class Links:
    """What a router's view says."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()
        self.least = 0

    def follow(self, addresses, draining=(), models=()) -> None:
        self.addresses = set(addresses)


@asynccontextmanager
async def following(orchestrators, tmp_path):
    """Three nodes and a router's view."""
    nodes, links = [Follower(name, orchestrators.addresses) for name in "abc"], Links()
    view = ClusterView("r", [], links, ViewCache(tmp_path / "view.json"), RouterTelemetry())
    running = [each.membership.run() for each in nodes] + [view.run(orchestrators.addresses)]
    tasks = [asyncio.create_task(each) for each in running]
    try:
        await until(lambda: links.addresses == {"a:1", "b:1", "c:1"}, 30)
        yield nodes, links
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def call(addresses: str, method: str, request):
    async with PLAIN.open(addresses, ORCHESTRATOR) as channel:
        return await answered(getattr(pb_grpc.OrchestratorServiceStub(channel), method)(request, timeout=15))


def deployed(nodes, model: str, since: float = 0.0) -> bool:
    return any(
        model in {each.model for each in instruction.deployments}
        for node in nodes
        for at, _, instruction in node.instructions
        if at >= since
    )


async def deploy(addresses: str, model: str) -> None:
    request = pb.DeployModelRequest(deployment=pb.Deployment(model=model, path=f"/{model}", replicas=1))
    await call(addresses, "DeployModel", request)


@pytest.mark.long
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGKILL, id="kill -9"),
        pytest.param(signal.SIGSTOP, id="SIGSTOP", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.lab),
    ],
)
async def test_a_standby_takes_over_what_was_accepted_and_instructs_again(orchestrators, tmp_path, end):
    leader = await orchestrators.leader()
    (standby,) = set(orchestrators.processes) - {leader}
    await asyncio.sleep(0.6)  # it looks at the lease twice a second
    with pytest.raises(RyzansteinError) as refused:
        async with PLAIN.open(standby, ORCHESTRATOR, retries=False) as channel:
            await answered(pb_grpc.OrchestratorServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=5))
    assert (refused.value.reason, dict(refused.value.metadata)) == ("NOT_LEADER", {"leader": leader})
    async with following(orchestrators, tmp_path) as (nodes, links):
        await deploy(standby, "before")
        await call(standby, "DrainNode", pb.DrainNodeRequest(node_id="a"))
        await until(lambda: deployed(nodes, "before"), 10)
        ended = time.monotonic()
        orchestrators.processes[leader].send_signal(end)
        # The order of the two addresses is that of a client which asks the dead one first.
        await orchestrators.leader(but=leader)
        await deploy(f"{leader},{standby}" if end is not signal.SIGSTOP else standby, "after")
        await until(lambda: deployed(nodes, "after", ended), LIMIT_S - (time.monotonic() - ended))
        took_s = time.monotonic() - ended
        assert links.addresses == {"a:1", "b:1", "c:1"}, "the router kept its view"
        listed = await call(standby, "ListDeployments", pb.ListDeploymentsRequest())
        assert {each.deployment.model: len(each.ready_nodes) for each in listed.deployments}["before"] == 1
        drained = {
            node.node_id: node.drain_requested for node in (await call(standby, "ListNodes", pb.ListNodesRequest())).nodes
        }
        assert drained == {"a": True, "b": False, "c": False}
        if end is signal.SIGSTOP:
            orchestrators.processes[leader].send_signal(signal.SIGCONT)
            await until(lambda: any(line["event"] == "leading no more" for line in orchestrators.logs[leader]), 10)
            assert not await orchestrators.leads(leader)
        for node in nodes:
            epochs = [heard for _, heard, _ in node.instructions]
            assert epochs == sorted(epochs), "no earlier leader was obeyed after a later one"
            held = [instruction for at, _, instruction in node.instructions if at > ended]
            before = {"before"} & {each.model for each in node.describe().models}
            assert all(before <= {each.model for each in instruction.deployments} for instruction in held), (
                "nothing was unloaded"
            )
    print(f"instructed again after {took_s:.2f} s")
    assert took_s < LIMIT_S


@pytest.mark.long
@pytest.mark.long
async def test_without_the_lease_service_nobody_places_and_nodes_keep_what_they_have(orchestrators, tmp_path):
    await orchestrators.leader()
    async with following(orchestrators, tmp_path) as (nodes, links):
        await deploy(orchestrators.addresses, "before")
        await until(lambda: deployed(nodes, "before"), 10)
        await orchestrators.redis.kill()
        held = [node.describe().models for node in nodes]
        async with asyncio.timeout(10):
            while any([await orchestrators.leads(each) for each in orchestrators.processes]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        assert [node.describe().models for node in nodes] == held
        assert links.addresses == {"a:1", "b:1", "c:1"}
        await orchestrators.redis.start()
        await orchestrators.leader()
        since = time.monotonic()
        await deploy(orchestrators.addresses, "after")
        await until(lambda: deployed(nodes, "after", since), 15)
        assert deployed(nodes, "before", since)
