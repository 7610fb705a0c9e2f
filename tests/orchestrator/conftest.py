from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from ryzanstein.auth.audit.audit_file import audit_files
from ryzanstein.auth.audit.auditor import Auditor
from ryzanstein.cluster import Deployment, Node
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import ControlPlane
from ryzanstein.orchestrator.leadership import SoleLeadership
from ryzanstein.orchestrator.service import OrchestratorServicer
from ryzanstein.orchestrator.state.changes import Change, DeploymentChanged, DeploymentRemoved, NodeChanged, NodeLeft
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.state.watch import ClusterDelta, Snapshot, Update
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2_grpc as pb_grpc
from ryzanstein.v1.worker_pb2 import Protection


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Follower:
    """What a router does with updates: a snapshot replaces everything, a delta must be the next version."""

    epoch: str = ""
    version: int = -1
    nodes: dict[str, Node] = field(default_factory=dict)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    snapshots: int = 0
    deltas: int = 0

    def apply(self, update: Update) -> None:
        if isinstance(update, Snapshot):
            self.snapshots += 1
            self.epoch, self.version = update.epoch, update.version
            self.nodes = {node.node_id: node for node in update.state.nodes}
            self.deployments = {deployment.model: deployment for deployment in update.state.deployments}
            return
        assert isinstance(update, ClusterDelta)
        assert update.version == self.version + 1, "a watcher may not see a gap"
        self.deltas += 1
        self.version = update.version
        self._change(update.change)

    def _change(self, change: Change) -> None:
        match change:
            case NodeChanged(node):
                self.nodes[node.node_id] = node
            case NodeLeft(node_id):
                del self.nodes[node_id]
            case DeploymentChanged(deployment):
                self.deployments[deployment.model] = deployment
            case DeploymentRemoved(model):
                del self.deployments[model]


@dataclass
class Serving:
    """A control plane behind a real gRPC server on loopback."""

    control: ControlPlane
    telemetry: OrchestratorTelemetry
    address: str
    stub: pb_grpc.OrchestratorServiceStub

    async def register(self, node_id: str = "a", incarnation: str = "1", **more: object) -> pb.RegisterNodeResponse:
        node = pb.Node(**{"node_id": node_id, "address": "127.0.0.1:50061", "incarnation": incarnation, "tp": 1, **more})
        return await self.stub.RegisterNode(pb.RegisterNodeRequest(node=node), timeout=10)

    async def node_ids(self) -> list[str]:
        return [node.node_id for node in (await self.stub.ListNodes(pb.ListNodesRequest(), timeout=10)).nodes]


@asynccontextmanager
async def serve(database: Path, **settings: object) -> AsyncIterator[Serving]:
    telemetry = OrchestratorTelemetry()
    chosen = OrchestratorSettings(database=database, **settings)
    async with AsyncExitStack() as stack:
        store = await Store.open(database, telemetry)
        stack.push_async_callback(store.close)
        control = await ControlPlane.restore(chosen, store, telemetry)
        rpc = RpcServer("127.0.0.1", 0, ["ryzanstein.v1.OrchestratorService"])
        files = await audit_files(chosen.audit_file, {"service": "orchestrator"})
        auditor = Auditor(telemetry.background, telemetry.audit_failures, (store, *files))
        servicer = OrchestratorServicer(SoleLeadership(control), auditor, chosen.tuning.max_nodes, Protection)
        pb_grpc.add_OrchestratorServiceServicer_to_server(servicer, rpc.server)
        await rpc.start()
        stack.push_async_callback(rpc.stop, 0)
        stack.push_async_callback(control.close)
        clockwork = asyncio.create_task(control.run())
        stack.push_async_callback(lambda: asyncio.gather(clockwork, return_exceptions=True))
        stack.callback(clockwork.cancel)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{rpc.port}"))
        yield Serving(control, telemetry, f"127.0.0.1:{rpc.port}", pb_grpc.OrchestratorServiceStub(channel))


async def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Returns when the condition (which may be a coroutine function) holds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        holds = condition()
        if asyncio.iscoroutine(holds):
            holds = await holds
        if holds:
            return
        assert asyncio.get_running_loop().time() < deadline, f"never came: {what}"
        await asyncio.sleep(0.02)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry() -> OrchestratorTelemetry:
    return OrchestratorTelemetry()


@pytest.fixture
def make_follower() -> Callable[[], Follower]:
    return Follower


@pytest.fixture
def eventually() -> Callable[..., object]:
    return wait_for


@pytest.fixture
def serving_at(tmp_path: Path) -> Callable[..., object]:
    """A context manager: an orchestrator on this test's database, with the settings given."""
    return lambda **settings: serve(**{"database": tmp_path / "orchestrator.sqlite", **settings})


@pytest.fixture
async def serving(serving_at: Callable[..., object]) -> AsyncIterator[Serving]:
    async with serving_at() as running:  # type: ignore[attr-defined]
        yield running


@pytest.fixture
def make_node() -> Callable[..., Node]:
    def make(node_id: str = "a", incarnation: str = "1", **more: object) -> Node:
        return Node(node_id, "127.0.0.1:50061", incarnation, **more)  # type: ignore[arg-type]

    return make


@pytest.fixture
def code_of() -> Callable[..., object]:
    """The status code that a call fails with."""

    async def code(call: grpc.aio.Call) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call  # type: ignore[misc]
        return failure.value.code()

    return code
