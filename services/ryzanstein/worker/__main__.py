"""`python -P -m ryzanstein.worker`: runs one node from its settings until a signal.

Exit codes: 0 stopped by SIGTERM or SIGINT; 1 failed (port taken, the initial model refused, a bug);
2 invalid settings.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ryzanstein.process.process_start import begin

    begin(ranks=True)

import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from ryzanstein.auth.audit.audit_file import audit_files
from ryzanstein.auth.audit.auditor import Auditor, audit_failures
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.backoff import Backoff
from ryzanstein.cluster import STOPS
from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.metrics import MetricsServer, NewMetricsPort
from ryzanstein.observe.tracing import Tracing
from ryzanstein.process.allotment import may_open
from ryzanstein.process.service_process import read_settings, run_service
from ryzanstein.rpc.debugging import DebugServicer, DebugSource
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.reading import RequestReading
from ryzanstein.rpc.server import RpcServer, terminated
from ryzanstein.rpc.tls.protection import protection_to_wire
from ryzanstein.rpc.tls.tls_settings import dialer_of, service_tls
from ryzanstein.v1.adapter_pb2 import DESCRIPTOR as ADAPTER
from ryzanstein.v1.adapter_pb2_grpc import add_AdapterServiceServicer_to_server
from ryzanstein.v1.debug_pb2 import DESCRIPTOR as DEBUG
from ryzanstein.v1.debug_pb2_grpc import add_DebugServiceServicer_to_server
from ryzanstein.v1.embedding_pb2 import DESCRIPTOR as EMBEDDING
from ryzanstein.v1.embedding_pb2_grpc import add_EmbeddingServiceServicer_to_server
from ryzanstein.v1.pages_pb2 import DESCRIPTOR as PAGES
from ryzanstein.v1.pages_pb2_grpc import add_PageServiceServicer_to_server
from ryzanstein.v1.text_pb2 import DESCRIPTOR as TEXT
from ryzanstein.v1.text_pb2_grpc import add_TextServiceServicer_to_server
from ryzanstein.v1.worker_pb2 import DESCRIPTOR
from ryzanstein.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from ryzanstein.worker.agent.adapters.files import MAX_RESIDENT
from ryzanstein.worker.agent.adapters.node_adapters import WantedAdapter
from ryzanstein.worker.agent.faces.adapters import AdapterServicer
from ryzanstein.worker.agent.faces.debug import NodeSight
from ryzanstein.worker.agent.faces.embeddings import NodeEmbeddingServicer
from ryzanstein.worker.agent.faces.pages import PageServicer
from ryzanstein.worker.agent.faces.service import WorkerServicer
from ryzanstein.worker.agent.faces.texts import TextServicer
from ryzanstein.worker.agent.membership.deployed import DeployedModels
from ryzanstein.worker.agent.membership.node_membership import NodeMember, NodeMembership
from ryzanstein.worker.agent.membership.obedience import KeptLeader
from ryzanstein.worker.agent.membership.reachable_address import ReachableAddress
from ryzanstein.worker.agent.memory.lending import KvLending
from ryzanstein.worker.agent.memory.needs import ModelNeeds
from ryzanstein.worker.agent.memory.node_memory import ModelMemory
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.models import NodeHealth, NodeModels
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.pages.traffic import PageTraffic
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.devices import device_of_node, keep_freed_memory
from ryzanstein.worker.engine_choice import engines_of
from ryzanstein.worker.ranks.starting.shared_server import RankServers
from ryzanstein.worker.ranks.starting.source import NewRankServer
from ryzanstein.worker.sizing import need_of, node_memory_bytes
from ryzanstein.worker.telemetry import NodeTelemetry
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics
from ryzanstein.worker.text.grammars.process import GrammarProcess
from ryzanstein.worker.text.programs.starting import ProgramBounds
from ryzanstein.worker.text.templates.process import TemplateProcess
from ryzanstein.worker.text.templates.rendering import ChatRenderer, RenderLimit

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.service_tls import ServiceTls

log = structlog.get_logger(__name__)

_LAST_FRAMES_S = 1.0
TEMPLATES_AGAIN = Backoff(0.05, 1.0, 5.0)
GRAMMARS_AGAIN = Backoff(0.05, 1.0, 5.0)


class RunningRenderer(ChatRenderer, Protocol):
    """A renderer that has to be run; see `TemplateProcess`."""

    async def run(self) -> None: ...


class RankSource(Protocol):
    """Where the ranks of all models come from; see `RankServers`."""

    def of(self, model: str) -> NewRankServer:
        """Returns where the ranks of a model come from. Empty: those of the first agent."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeMachine:
    """What a node takes from the machine that it runs on: ports and processes. The simulator has its own.

    `on_agent` is called with each agent and the name of its model, empty for the first one, `on_deployed` with what follows
    the orchestrator.
    """

    new_metrics: NewMetricsPort = MetricsServer
    new_templates: Callable[[ProgramBounds, Callable[[RenderLimit], None]], RunningRenderer] = TemplateProcess
    new_ranks: Callable[[], RankSource] = RankServers
    on_agent: Callable[[str, NodeAgent], None] = lambda model, agent: None
    on_deployed: Callable[[DeployedModels], None] = lambda deployed: None


async def serve(settings: WorkerSettings, machine: NodeMachine | None = None) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises OSError or RyzansteinError when it cannot start.
    """
    machine = machine or NodeMachine()
    if settings.has_ranks:
        settings = _on_a_device(settings)
    if settings.kv_replication != "none":
        keep_freed_memory()
    telemetry = NodeTelemetry()
    node = telemetry.node
    async with AsyncExitStack() as stack:
        tracing = Tracing(
            "worker",
            settings.otlp_endpoint,
            folder=settings.trace_dir,
            ratio=settings.trace_ratio,
            name=settings.node_id,
            node_id=settings.node_id,
        )
        stack.callback(tracing.close)
        metrics = machine.new_metrics(telemetry.registry, settings.host, settings.metrics_port)
        stack.callback(metrics.close)
        templates = machine.new_templates(settings.tuning.templates, node.on_template_limit)
        grammars = GrammarProcess(settings.tuning.grammars, node.grammars.observer)
        lending = KvLending(settings.tuning.beat_busy_s)
        tls = service_tls(settings, Peer(PeerRole.NODE, settings.node_id), "worker", node.registry, node.background)
        traffic = PageTraffic(settings, telemetry.first.pages, dialer_of(tls))
        node.background.supervise("kv_lending", lending.run)
        ranks = machine.new_ranks()
        stack.push_async_callback(ranks.close)

        def new_agent(model: str, place: int) -> NodeAgent:
            own = (settings.of_model(model), telemetry.add(model)) if model else (settings, telemetry.first)
            agent = NodeAgent(
                *own,
                tracing,
                templates,
                new_engines=engines_of(own[0], place * settings.tp, ranks.of(model)),
                lending=lending,
                traffic=traffic,
                constraints=grammars,
            )
            machine.on_agent(model, agent)
            return agent

        models = NodeModels(new_agent, node.background, telemetry.remove)
        stack.push_async_callback(models.unload)
        node.background.supervise("templates", templates.run, TEMPLATES_AGAIN)
        node.background.supervise("grammars", grammars.run, GRAMMARS_AGAIN)
        sight = NodeSight(models)
        source = DebugSource("worker", settings.node_id, settings, telemetry.registry, sight.requests, sight.add_stacks)
        await _serve_rpc(
            settings,
            models,
            templates,
            node,
            metrics_port=metrics.port,
            traffic=traffic,
            tls=tls,
            source=source,
            on_deployed=machine.on_deployed,
        )


def _on_a_device(settings: WorkerSettings) -> WorkerSettings:
    """Returns the settings with cpu or cuda for auto. Raises FAILED_PRECONDITION if there are too few GPUs."""
    choice = device_of_node(settings.device, settings.tp, settings.num_models)
    log.info("device", device=choice.device, reason=choice.reason)
    return settings.model_copy(update={"device": choice.device})


async def _serve_rpc(
    settings: WorkerSettings,
    models: NodeModels,
    templates: ChatRenderer,
    metrics: NodeMetrics,
    *,
    metrics_port: int,
    traffic: PageTraffic,
    tls: ServiceTls | None,
    source: DebugSource,
    on_deployed: Callable[[DeployedModels], None],
) -> None:
    files = (DESCRIPTOR, PAGES, TEXT, EMBEDDING, ADAPTER, DEBUG)
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    rpc_metrics = RpcMetrics("worker", metrics.registry)
    rpc = RpcServer(
        settings.host,
        settings.grpc_port,
        names,
        max_request_bytes=settings.max_request_bytes,
        reading=RequestReading(settings.tuning.max_request_records, rpc_metrics.malformed),
        metrics=rpc_metrics,
        tls=tls,
        health_port=settings.health_port,
        builtin=settings.grpc_server == "builtin",
    )
    audited = await audit_files(settings.audit_file, {"service": "worker", "node_id": settings.node_id})
    auditor = Auditor(metrics.background, audit_failures("worker", metrics.registry), audited)
    add_WorkerServiceServicer_to_server(WorkerServicer(models, auditor, partial(protection_to_wire, settings, tls)), rpc.server)
    add_PageServiceServicer_to_server(PageServicer(models), rpc.server)
    add_TextServiceServicer_to_server(TextServicer(models, templates), rpc.server)
    add_EmbeddingServiceServicer_to_server(NodeEmbeddingServicer(models, metrics.embeddings), rpc.server)
    add_AdapterServiceServicer_to_server(AdapterServicer(models, auditor), rpc.server)
    add_DebugServiceServicer_to_server(DebugServicer(source), rpc.server)
    await rpc.start()
    log.info(
        "serving",
        host=settings.host,
        grpc_port=rpc.port,
        metrics_port=metrics_port,
        health_port=rpc.health_port,
        tls=settings.tls,
        tls_port=rpc.tls_port,
    )
    try:
        await _live(settings, models, metrics, rpc, traffic, on_deployed=on_deployed)
    finally:
        models.end_links()
        await rpc.stop(_LAST_FRAMES_S)
        await metrics.background.close()
    log.info("stopped")


async def _live(
    settings: WorkerSettings,
    models: NodeModels,
    metrics: NodeMetrics,
    rpc: RpcServer,
    traffic: PageTraffic,
    *,
    on_deployed: Callable[[DeployedModels], None],
) -> None:
    """Runs until SIGTERM or SIGINT and the drain after it; beats go on until the drain ends."""
    background = metrics.background
    background.watch_loop()
    memory = ModelMemory(settings.model_memory_bytes or node_memory_bytes(settings))
    needs = ModelNeeds(lambda path: need_of(path, settings), background)
    deployed = DeployedModels(models, memory, needs, _started_with(settings), background)
    on_deployed(deployed)
    for name, path in settings.named_adapters():
        models.first.node.adapters.want(name, WantedAdapter(path))
    models.start(NodeHealth(rpc))
    deployed.start()
    membership: NodeMembership | None = None
    tasks = []
    if settings.orchestrator:
        address = ReachableAddress(settings.advertise_address, settings.host, rpc.port, rpc.tls_port)
        member = NodeMember(models, deployed, memory, address, traffic.known)
        leader = KeptLeader(settings.kept_in, settings.node_id, settings.orchestrator)
        membership = NodeMembership(settings.orchestrator, member, metrics, traffic.dialer, leader)
        tasks = [background.supervise("deployed_models", deployed.run), background.supervise("membership", membership.run)]
    await background.until(_drained(models, settings.drain_grace_s))
    models.stop()
    for task in tasks:
        task.cancel()
    if membership is not None:
        await membership.leave()


async def _drained(models: NodeModels, grace_s: float) -> None:
    await terminated()
    await models.drain(grace_s, STOPS)


def _started_with(settings: WorkerSettings) -> list[ModelChoice]:
    """Returns the models that the node serves from the start, the first one first."""
    first = [ModelChoice.at(settings.model, settings.model_name)] if settings.model else []
    return first + [ModelChoice.at(path, name) for name, path in settings.further_models()]


def main() -> int:
    """Runs the process and returns its exit code."""
    settings = read_settings(WorkerSettings)
    may_open(MAX_RESIDENT * settings.num_models)  # else fewer adapters are in memory at once
    return run_service("worker", settings, serve, (OSError, RyzansteinError), node_id=settings.node_id)


if __name__ == "__main__":
    sys.exit(main())
