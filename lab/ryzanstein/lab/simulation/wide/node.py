"""A node without ranks: real links to routers and real membership around an engine that is a script.

Real are the gRPC service with its stream, reader and writer, the text of answers, the rules of beats, and the membership.
Ranks, memory, pages, files and metrics of its own are not there, and a load is a time.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog
from prometheus_client import CollectorRegistry

from ryzanstein import errors
from ryzanstein.cluster import MODEL_CHANGES, STOPS, Beat, Instruction, ModelNeed, ModelReport, Node, NodeReport, NodeState
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import Attempt
from ryzanstein.lab.simulation.planning.plan import FIRST_MODEL
from ryzanstein.lab.simulation.scripted.model import ScriptedModel, demo_text
from ryzanstein.lab.simulation.wide.engine import WideEngine
from ryzanstein.observe.tracing import Tracing
from ryzanstein.process.awake import AwakeClock
from ryzanstein.process.background import Background
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.server import RpcServer, terminated
from ryzanstein.v1.worker_pb2 import DESCRIPTOR
from ryzanstein.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.faces.service import WorkerServicer
from ryzanstein.worker.agent.membership.node_membership import NodeMembership
from ryzanstein.worker.agent.membership.obedience import KeptLeader
from ryzanstein.worker.agent.node import RouterLinks
from ryzanstein.worker.agent.pages.tiers.known_nodes import KnownNodes
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.agent.versions.generations import RunningGenerations
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.grammars.judge import NoJudge
from ryzanstein.worker.text.templates.renderer import LocalRenderer

log = structlog.get_logger(__name__)

CONTEXT_LENGTH = 16_384
_MEMORY_BYTES, _MODEL_BYTES = 64 * 2**30, 40 * 2**30  # no room for two revisions at once
_LAST_FRAMES_S = 1.0
_ORCHESTRATOR = "requested by the orchestrator"


class WideHost:
    """What the nodes of a simulation share: telemetry that nobody reads, and the text side of the model."""

    def __init__(self) -> None:
        self.telemetry = WorkerTelemetry()
        self.tracing = Tracing("worker")
        self.templates = LocalRenderer()
        self.rpc_metrics = RpcMetrics("worker", CollectorRegistry())
        self.text = demo_text()
        self.model = ScriptedModel.demo()


class WideNode:
    """One node. `serve` runs it until SIGTERM. Has those parts of a `NodeAgent` that its service and streams use."""

    def __init__(self, settings: WorkerSettings, host: WideHost, *, step_s: float, load_s: float) -> None:
        self.settings, self._host, self._load_s = settings, host, load_s
        self.incarnation = uuid.uuid4().hex
        self.awake = AwakeClock()
        self.background = Background("worker", CollectorRegistry())
        self.drains: set[str] = set()
        self.loaded = False
        self.revision = 0
        self.engine = WideEngine(host.model, step_s, settings.max_sequences, self._on_step)
        self.running = RunningGenerations(self.engine.send, host.telemetry, host.tracing)
        # Versions have more than this; what closes links uses this alone.
        self.links = RouterLinks(settings.tuning.links, cast(Any, self), host.telemetry)
        self.submissions = WideSubmissions(self, host)
        self.adapters = SimpleNamespace(able=False)
        self.constraints = NoJudge()
        self._beats = count(1)
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._changing: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[WideNode]:
        """Yields its only version, as `ModelVersions` do theirs."""
        yield self

    @property
    def state(self) -> NodeState:
        if not self.loaded:
            return NodeState.STARTING
        return NodeState.DRAINING if self.drains else NodeState.READY

    def beat(self) -> Beat:
        """Returns the current state of the model as a new beat."""
        state, engine = self.state, self.engine
        return Beat(
            sequence=next(self._beats),
            state=state,
            model=FIRST_MODEL,
            context_length=CONTEXT_LENGTH if self.loaded else 0,
            load=engine.load,
            step=engine.step,
            reason=f"draining: {', '.join(sorted(self.drains))}" if state is NodeState.DRAINING else "",
            time=time.time(),
        )

    def changed(self) -> None:
        """Sends the next beat at once, and then as often as what runs demands."""
        if self._timer is not None:
            self._timer.cancel()
            self._send_beat()

    def _send_beat(self) -> None:
        beat, tuning = self.beat(), self.settings.tuning
        self.links.beat(beat)
        self._busy = len(self.running) > 0 or beat.load.running > 0
        pause_s = tuning.beat_busy_s if self._busy else tuning.beat_idle_s
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._send_beat)

    def _on_step(self, events: Any) -> None:
        self.running.on_step(events)

    async def serve(self, directory: Path) -> None:
        """Serves until SIGTERM, then drains, leaves the cluster and ends, as a node does."""
        settings = self.settings
        names = [service.full_name for service in DESCRIPTOR.services_by_name.values()]
        rpc = RpcServer(settings.host, settings.grpc_port, names, metrics=self._host.rpc_metrics)
        models = SimpleNamespace(linked=self._linked, of=lambda model: SimpleNamespace(node=self))
        # Neither acts of operators nor the protection are asked of it here.
        add_WorkerServiceServicer_to_server(WorkerServicer(cast(Any, models), cast(Any, None), cast(Any, None)), rpc.server)
        await rpc.start()
        self.background.watch_loop()
        self._send_beat()
        loading = self.background.once("first_model", self._load(0))
        leader = KeptLeader(directory, settings.node_id, settings.orchestrator)
        membership = NodeMembership(settings.orchestrator, WideMember(self), self._host.telemetry.node, leader=leader)
        member = self.background.supervise("membership", membership.run)
        try:
            await self.background.until(self._drained())
            member.cancel()
            loading.cancel()
            await membership.leave()
        finally:
            self.links.end()
            await rpc.stop(_LAST_FRAMES_S)
            self.awake.close()
            await self.background.close()

    def _linked(self, model: str) -> SimpleNamespace:
        if model:
            raise errors.unavailable("MODEL_NOT_SERVED", f"node {self.settings.node_id} has no stream for model {model!r}")
        return SimpleNamespace(node=self)

    async def _drained(self) -> None:
        await terminated()
        self.drains.add(STOPS)
        self.changed()
        await self._idle()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _idle(self) -> None:
        """Returns when nothing runs, or the grace is over."""
        try:
            async with asyncio.timeout(self.settings.drain_grace_s):
                await self.running.idle.wait()
        except TimeoutError:
            log.warning("drain grace period expired", running=len(self.running))

    async def _load(self, revision: int) -> None:
        self.loaded = False
        self.changed()
        await asyncio.sleep(self._load_s)
        self.revision, self.loaded = revision, True
        self.changed()

    def follow(self, instruction: Instruction) -> None:
        """Drains or takes work as instructed, and changes its model to the revision that the orchestrator wants."""
        if instruction.drain != (_ORCHESTRATOR in self.drains):
            (self.drains.add if instruction.drain else self.drains.discard)(_ORCHESTRATOR)
            self.changed()
        for each in instruction.deployments:
            if each.model != FIRST_MODEL or each.revision == self.revision or self._changing is not None:
                continue
            if self.loaded and not self.revision and each.revision == 1:  # what it was started with is taken over
                self.revision = 1
            elif self.loaded:
                self._changing = self.background.once("change_model", self._change(each.revision))

    async def _change(self, revision: int) -> None:
        log.info("model change started", revision=revision)
        self.drains.add(MODEL_CHANGES)
        self.changed()
        try:
            await self._idle()
            self.running.fail_all(errors.unavailable("NODE_NOT_READY", "the model changes"), node_fault=False)
            self.engine.close()
            self.loaded = False
            self.drains.discard(MODEL_CHANGES)
            await self._load(revision)
        finally:
            self.drains.discard(MODEL_CHANGES)
            self._changing = None


class WideSubmissions:
    """Takes attempts to the engine, as `Submissions` do, of a model that is always loaded in one version."""

    def __init__(self, node: WideNode, host: WideHost) -> None:
        self._node, self._host = node, host
        self._groups = count(1)

    def may_take_long(self, attempt: Attempt) -> bool:
        return intake.is_long(attempt)

    async def submit(self, link: RouterLink, handle: int, attempt: Attempt) -> None:
        """Accepts the attempt, or fails it on its link."""
        try:
            self._require_taking()
            arrived = await intake.arrive(attempt, self._host.text, self._host.templates, self._node.constraints)
            self._require_taking()
            self._start(link, handle, arrived)
        except RyzansteinError as error:
            self.refuse(link, handle, error, generation_id=attempt.generation_id, attempt=attempt.attempt)

    def _start(self, link: RouterLink, handle: int, arrived: intake.Arrived) -> None:
        node, text, read = self._node, arrived.text, arrived.read
        was_idle = not len(node.running)
        asked = intake.group_of(arrived.attempt, next(self._groups), read.token_ids, text, CONTEXT_LENGTH)
        reply = intake.reply_of(read, arrived.attempt)
        submit = node.running.open(link, handle, arrived.attempt, asked, text, texts=arrived.texts, reply=reply)
        if submit is not None:
            node.engine.send(submit)
        if was_idle:
            node.changed()

    def _require_taking(self) -> None:
        node = self._node
        if node.drains:
            raise errors.draining(node.settings.node_id)
        if not node.loaded:
            raise errors.unavailable("NODE_NOT_READY", f"node {node.settings.node_id} loads its model")
        if node.engine.load.running >= node.settings.max_sequences:
            raise errors.queue_full(node.engine.load.running, node.settings.max_sequences)

    def cancel(self, link: RouterLink, handle: int) -> None:
        self._node.running.cancel(link, handle)

    def refuse(self, link: RouterLink, handle: int, error: RyzansteinError, **ids: str | int) -> None:
        """Fails an attempt of which nothing was started."""
        log.info("generation refused", reason=error.reason, message=error.message, **ids)
        link.fail(handle, error, node_fault=False)


class WideMember:
    """A `MembershipObserver`: the node as the orchestrator sees it."""

    def __init__(self, node: WideNode) -> None:
        self._node = node
        self._known = KnownNodes(lambda cause: None)
        self._asked: tuple[str, ...] = ()

    async def locate(self) -> None:
        """Does nothing: a simulated host has one name."""

    def describe(self) -> Node:
        settings, beat = self._node.settings, self._node.beat()
        return Node(
            settings.node_id,
            f"{settings.host}:{settings.grpc_port}",
            self._node.incarnation,
            state=beat.state,
            model=beat.model,
            context_length=beat.context_length,
            load=beat.load,
            models=self._reports(beat),
            memory_bytes=_MEMORY_BYTES,
            host=settings.node_host,
            zone=settings.node_zone,
        )

    def report(self) -> NodeReport:
        beat = self._node.beat()
        needs = tuple(ModelNeed(path, _MODEL_BYTES) for path in self._asked)
        digest = self._known.digest
        return NodeReport(beat, self._reports(beat), _MEMORY_BYTES, needs, digest, takes_member_changes=True)

    def _reports(self, beat: Beat) -> tuple[ModelReport, ...]:
        report = ModelReport(
            FIRST_MODEL,
            str(MODEL_DIR),
            self._node.revision,
            beat.state,
            beat.context_length,
            beat.load,
            beat.reason,
            memory_bytes=_MODEL_BYTES,
            started_with=True,
        )
        return (report,)

    def follow(self, instruction: Instruction) -> None:
        if instruction.members is not None:
            self._known.follow(instruction.members)
        self._asked = instruction.measure_paths
        self._node.follow(instruction)

    async def wanted(self, timeout_s: float) -> None:
        await self._known.asked(timeout_s)
