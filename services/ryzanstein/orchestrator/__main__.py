"""`python -P -m ryzanstein.orchestrator`: settings, store, server, signals.

Exit codes: 0 stopped by SIGTERM or SIGINT, 1 it failed (port taken, store unusable or taken by another orchestrator, a bug),
2 bad settings.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ryzanstein.process.process_start import begin

    begin(ranks=False)

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from ryzanstein.auth.audit.audit_file import audit_files
from ryzanstein.auth.audit.auditor import Auditor
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.metrics import MetricsServer, NewMetricsPort
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.orchestrator.leadership import Leadership
from ryzanstein.orchestrator.opening import NewRedis, leadership_of, opened_redis, opened_store
from ryzanstein.orchestrator.service import OrchestratorServicer
from ryzanstein.orchestrator.state.stored import StoreError
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.process.background import STOP
from ryzanstein.process.service_process import read_settings, run_service
from ryzanstein.rpc.debugging import DebugServicer, DebugSource
from ryzanstein.rpc.interceptors import RpcMetrics
from ryzanstein.rpc.reading import RequestReading
from ryzanstein.rpc.server import RpcServer, terminated
from ryzanstein.rpc.tls.protection import protection_to_wire
from ryzanstein.rpc.tls.tls_settings import service_tls
from ryzanstein.v1.debug_pb2 import DESCRIPTOR as DEBUG
from ryzanstein.v1.debug_pb2_grpc import add_DebugServiceServicer_to_server
from ryzanstein.v1.orchestrator_pb2 import DESCRIPTOR
from ryzanstein.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OrchestratorMachine:
    """What an orchestrator takes from its machine: ports, and Redis. The simulator has its own.

    `on_lead` is called with what leads.
    """

    new_metrics: NewMetricsPort = MetricsServer
    new_redis: NewRedis = opened_redis
    on_lead: Callable[[Leadership], None] = lambda lead: None


async def serve(settings: OrchestratorSettings, machine: OrchestratorMachine | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError or StoreError when it cannot start."""
    machine = machine or OrchestratorMachine()
    telemetry = OrchestratorTelemetry()
    async with opened_store(settings, telemetry, machine.new_redis) as store:
        lead = await leadership_of(settings, store, telemetry, machine.new_redis)
        machine.on_lead(lead)
        files = await audit_files(settings.audit_file, {"service": "orchestrator"})
        auditor = Auditor(telemetry.background, telemetry.audit_failures, (store, *files))
        metrics = machine.new_metrics(telemetry.registry, settings.host, settings.metrics_port)
        try:
            await _serve_rpc(settings, lead, auditor, telemetry, metrics.port)
        finally:
            metrics.close()


async def _serve_rpc(
    settings: OrchestratorSettings,
    lead: Leadership,
    auditor: Auditor,
    telemetry: OrchestratorTelemetry,
    metrics_port: int,
) -> None:
    names = [service.full_name for each in (DESCRIPTOR, DEBUG) for service in each.services_by_name.values()]
    tls = service_tls(settings, Peer(PeerRole.ORCHESTRATOR), "orchestrator", telemetry.registry, telemetry.background)
    rpc_metrics = RpcMetrics("orchestrator", telemetry.registry)
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
    protection = partial(protection_to_wire, settings, tls)
    servicer = OrchestratorServicer(lead, auditor, settings.tuning.max_nodes, protection)
    add_OrchestratorServiceServicer_to_server(servicer, rpc.server)
    source = DebugSource("orchestrator", "orchestrator", settings, telemetry.registry)
    add_DebugServiceServicer_to_server(DebugServicer(source), rpc.server)
    await rpc.start()
    await rpc.set_started()
    # Ready at once, even while watchers wait for the previous members: those must be able to
    # register.
    await rpc.set_ready(True)
    log.info(
        "serving",
        host=settings.host,
        grpc_port=rpc.port,
        metrics_port=metrics_port,
        health_port=rpc.health_port,
        tls=settings.tls,
        tls_port=rpc.tls_port,
    )
    background = telemetry.background
    background.watch_loop()
    leading = background.supervise("lead", lead.run, STOP)
    try:
        await background.until(terminated())
    finally:
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        try:
            await lead.close()
        finally:
            await rpc.stop(settings.drain_grace_s)
    log.info("stopped")


def main() -> int:
    """Runs the process and returns its exit code."""
    settings = read_settings(OrchestratorSettings)
    return run_service("orchestrator", settings, serve, (OSError, StoreError, RyzansteinError))


if __name__ == "__main__":
    sys.exit(main())
