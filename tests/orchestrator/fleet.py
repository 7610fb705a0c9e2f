"""Nodes that answer as real ones do, one beat at a time, and a control plane that they beat to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from ryzanstein.cluster import Beat, Deployment, ModelNeed, ModelReport, Node, NodeReport, NodeState
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.control import ControlPlane, Grant
from ryzanstein.orchestrator.placing.halts import Halts
from ryzanstein.orchestrator.placing.needs import MeasuredNeeds
from ryzanstein.orchestrator.placing.replicas.refusals import Refusals
from ryzanstein.orchestrator.placing.replicas.replica_leases import ReplicaLeases
from ryzanstein.orchestrator.reconcile import Reconciler, Sources
from ryzanstein.orchestrator.state.catalog import Catalog
from ryzanstein.orchestrator.state.changes import NodeChanged
from ryzanstein.orchestrator.state.members.registry import Registry
from ryzanstein.orchestrator.state.store import Store
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

READY, STARTING, FAILED = NodeState.READY, NodeState.STARTING, NodeState.FAILED


@asynccontextmanager
async def restored(path, **settings):
    """A control plane on the file; leaving the block is a crash."""
    telemetry = OrchestratorTelemetry()
    store = await Store.open(path, telemetry)
    try:
        tuning = {"rollout": {"min_ready_s": 0.0}, **settings.pop("tuning", {})}
        yield await ControlPlane.restore(OrchestratorSettings(database=path, tuning=tuning, **settings), store, telemetry)
    finally:
        await store.close()


@dataclass
class FakeNode:
    """A node with room for 100 bytes on which a directory needs what `sizes` says."""

    node_id: str
    sizes: dict[str, int | str]
    models: dict[str, ModelReport] = field(default_factory=dict)
    lease_id: str = ""
    sequence: int = 0
    asked: tuple[str, ...] = ()
    assigned: dict[str, Deployment] = field(default_factory=dict)
    room: int = 100
    place: dict[str, str] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)

    def join(self, control):
        self.lease_id = control.register(Node(self.node_id, "h:1", "1", state=READY, **self.place)).lease_id
        self.beat(control)

    def beat(self, control):
        self.sequence += 1
        needs = [
            ModelNeed(path, error=size) if isinstance(size, str) else ModelNeed(path, size)
            for path in self.asked
            if (size := self.sizes.get(path)) is not None
        ]
        beat = Beat(self.sequence, READY)
        report = NodeReport(beat, tuple(self.models.values()), self.room, tuple(needs), starts=self.starts)
        instruction = control.beat(self.node_id, self.lease_id, report)
        self.asked = instruction.measure_paths
        self.assigned = {deployment.model: deployment for deployment in instruction.deployments}
        return instruction

    def load(self):
        """Serves what it was told, at once."""
        self.models = {
            name: ModelReport(name, assigned.path, assigned.revision, READY, memory_bytes=int(self.sizes[assigned.path]))
            for name, assigned in self.assigned.items()
        }

    def advance(self, now, load_s):
        """Goes on with what it was told: loads beside what it has where both fit, else in its place, in `load_s`."""
        for name in self.models.keys() - self.assigned.keys():
            del self.models[name]
        for name, wanted in self.assigned.items():
            report, size = self.models.get(name), int(self.sizes[wanted.path])
            fresh = ModelReport(name, wanted.path, wanted.revision, STARTING, memory_bytes=size)
            if report is None or wanted.revision not in (report.revision, report.next_revision):
                beside = report is not None and report.state is READY and report.memory_bytes + size <= self.room
                self.models[name] = replace(report, next_revision=wanted.revision, next_state=STARTING) if beside else fresh
                self.began[name] = now
            elif name in self.began and now - self.began[name] >= load_s:
                del self.began[name]
                self.models[name] = replace(fresh, state=READY)


class Simulated:
    """What a control plane does with beats, on a clock that a test moves and without a store."""

    def __init__(self, *deployments, bounds, halts=None):
        self.now = 0.0
        self.registry = Registry(self._publish, lease_s=1e9, max_nodes=1000, monotonic=lambda: self.now, wall=lambda: self.now)
        self.catalog = Catalog(self._publish, 100)
        self.needs = MeasuredNeeds(lambda: self.catalog.paths, lambda: self.now)
        self.halts = halts or Halts()
        self._sources = Sources(self.registry, self.catalog, Refusals(lambda: self.now), self.needs, self.halts)
        self._bounds = bounds
        self.restart()
        for deployment in deployments:
            self.catalog.put(deployment)

    def restart(self):
        """Forgets all that is not stored or reported."""
        leases = ReplicaLeases(lambda: self.now, 600.0, 1.0)
        self.reconciler = Reconciler(self._sources, OrchestratorTelemetry(), lambda: self.now, leases, self._bounds)
        self.reconciler.settle()

    def _publish(self, change):
        if hasattr(self, "reconciler") and not (isinstance(change, NodeChanged) and change.load_only):
            self.reconciler.invalidate()

    def register(self, node):
        return Grant(self.registry.join(node), 1.0, 1.0)

    def beat(self, node_id, lease_id, report):
        node = self.registry.beat(node_id, lease_id, report)
        if self.needs.note(node, report.needs):
            self.reconciler.invalidate()
        self.reconciler.reported(node, report.starts)
        return self.reconciler.instruct(node)

    def tick(self):
        self.reconciler.tick()


class Fleet:
    """Nodes that beat when told to."""

    def __init__(self, control, *names, sizes, plural=True, room=100):
        self.nodes = [FakeNode(name, sizes, room=room if plural else 0) for name in names]
        self.join(control)

    def join(self, control):
        self.control = control
        for node in self.nodes:
            node.join(control)

    def round(self):
        for node in self.nodes:
            node.beat(self.control)
        self.control.tick()
        for node in self.nodes:
            node.beat(self.control)

    async def deploy(self, deployment, **more):
        call = asyncio.create_task(self.control.deploy(deployment, **more))
        while not call.done():
            await asyncio.sleep(0.001)
            self.round()
        stored = call.result()
        self.round()
        return stored

    def revisions(self, model="m"):
        return [node.assigned[model].revision if model in node.assigned else None for node in self.nodes]

    def load(self):
        for node in self.nodes:
            node.load()
        self.round()

    def advance(self, now, load_s=0.0):
        """All nodes go on with what they were told."""
        for node in self.nodes:
            node.advance(now, load_s)
        self.round()

    def ready(self, model="m"):
        """The revisions that nodes answer with."""
        reports = {node.node_id: node.models[model] for node in self.nodes if model in node.models}
        return {node_id: report.revision for node_id, report in reports.items() if report.state is READY}

    def status(self):
        (status,) = self.control.deployments()
        return status


SIZES = {"/m": 10, "/new": 20, "/huge": 500, "/bad": "no config.json"}
