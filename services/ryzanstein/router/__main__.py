"""Runs a router: `python -P -m ryzanstein.router --nodes 127.0.0.1:50061`.

Reads the settings, links the nodes and binds the ports of the faces. The router is ready as soon as
one node is. On SIGTERM it reports not ready, gives running streams the grace period to end, and stops.
Exit codes: 0 stopped by SIGTERM or SIGINT, 1 failed (port taken, state unusable, a bug), 2 bad
settings.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ryzanstein.process.process_start import begin

    begin(ranks=False)

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

import structlog

from ryzanstein.addresses import is_loopback
from ryzanstein.auth.certificates.public import PublicCertificates
from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.metrics import MetricsServer, NewMetricsPort
from ryzanstein.process.allotment import may_open, memory_bytes
from ryzanstein.process.background import STOP
from ryzanstein.process.service_process import read_settings, run_service
from ryzanstein.process.spare_memory import CalmCollector, SpareMemory
from ryzanstein.router.assembly import MAX_RPC_CONNECTIONS, Router, assembled, grpc_face, let_find, peer_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.faces.http.app import create_app
from ryzanstein.router.faces.http.gate import HttpLimits
from ryzanstein.router.faces.http.lora.routes import AdapterAccess
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds
from ryzanstein.router.faces.http.serving.host_names import HostNames
from ryzanstein.router.faces.http.serving.server import HttpServer
from ryzanstein.router.faces.websocket.face import WebSocketFace
from ryzanstein.router.faces.websocket.limits import SocketLimits
from ryzanstein.router.processes.shares import run_processes
from ryzanstein.router.processes.siblings import Heart
from ryzanstein.router.telemetry import HandshakeMetrics, RouterTelemetry
from ryzanstein.rpc.server import RpcServer, terminated
from ryzanstein.rpc.tls.listener import HandshakeBounds, Handshakes
from ryzanstein.rpc.tls.tls_settings import dialer_of
from ryzanstein.survey.adapters import AdapterClient

log = structlog.get_logger(__name__)


class WebFace(Protocol):
    """The face for HTTP and WebSockets; see `HttpServer`."""

    port: int

    async def start(self) -> None: ...

    async def live(self) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


NewWebFace = Callable[[Router, RouterSettings], WebFace]
Assemble = Callable[[RouterSettings], AbstractAsyncContextManager[Router]]


def web_face(router: Router, settings: RouterSettings) -> HttpServer:
    """Returns the server of HTTP and WebSockets, not yet started."""
    limits = HttpLimits(
        max_body_bytes=settings.http_max_body_bytes,
        max_arriving_bytes=max(settings.http_max_arriving_bytes, settings.http_max_body_bytes),
        max_leaving_bytes=settings.http_max_leaving_bytes,
        max_messages=settings.max_messages,
        body_timeout_s=settings.tuning.http_body_timeout_s,
    )
    bounds = ConnectionBounds(
        max_connections=settings.http_max_connections,
        header_timeout_s=settings.tuning.http_header_timeout_s,
        keep_alive_s=settings.http_keep_alive_s,
    )
    if settings.http and not may_open(_num_connections(settings)):
        log.warning("open file limit is too low for http_max_connections", http_max_connections=settings.http_max_connections)
    app = create_app(
        router.core,
        router.telemetry,
        router.entrance,
        limits,
        _origins(settings),
        sessions=router.sessions,
        hosts=_host_names(router, settings),
        metrics=settings.http_metrics,
        socket_path=WebSocketFace.path if settings.websocket else "",
        tracing=router.tracing,
        adapters=_adapter_access(router, settings) if settings.adapter_routes else None,
    )
    refused = router.telemetry.http_refused
    return HttpServer(
        app,
        settings.host,
        settings.http_port,
        bounds,
        lambda reason: refused.labels(reason).inc(),
        upgrades=_websocket_face(router, settings) if settings.websocket else None,
        tls=None if router.certificates is None else _handshakes(router.certificates, router.telemetry),
        shares_port=settings.processes > 1,
    )


def _handshakes(certificates: PublicCertificates, telemetry: RouterTelemetry) -> Handshakes:
    return Handshakes(lambda: certificates.current.context, HandshakeMetrics(telemetry.registry))


def _adapter_access(router: Router, settings: RouterSettings) -> AdapterAccess:
    return AdapterAccess(partial(AdapterClient, settings.orchestrator, dialer_of(router.tls)), router.links.adapter)


def _num_connections(settings: RouterSettings) -> int:
    """Returns how many connections of clients there may be; gRPC counts its own only with TLS."""
    handshakes = HandshakeBounds().max_open
    with_tls = 2 * handshakes + MAX_RPC_CONNECTIONS
    between_services = 0 if settings.tls == "off" else handshakes
    return settings.http_max_connections + between_services + (with_tls if settings.tls_cert is not None else 0)


async def serve(
    settings: RouterSettings,
    *,
    assemble: Assemble = assembled,
    new_web_face: NewWebFace = web_face,
    new_metrics: NewMetricsPort = MetricsServer,
    heart: Heart | None = None,
) -> None:
    """Runs a router until SIGTERM or SIGINT. `heart` beats if it is one process of several.

    Raises OSError or RyzansteinError when the router cannot start.
    """
    if settings.reveals_keys:
        log.warning("keys cross the network in clear, unless a proxy terminates TLS: see tls_cert", host=settings.host)
    async with assemble(settings) as router:
        router.telemetry.background.watch_loop()
        if heart is not None:
            router.telemetry.background.supervise("heart", heart.beat, STOP)
        metrics = new_metrics(router.telemetry.registry, settings.host, settings.metrics_port)
        try:
            await _serve_faces(router, settings, new_web_face(router, settings), metrics.port)
        finally:
            metrics.close()
    log.info("stopped")


async def _serve_faces(router: Router, settings: RouterSettings, http: WebFace, metrics_port: int) -> None:
    rpc = grpc_face(router, settings)
    background = router.telemetry.background
    peers = peer_face(router, settings)
    await rpc.start()
    if peers is not None:
        await peers.start()
        let_find(router, settings, peers, rpc.port)
    if settings.http:
        await http.start()
        background.supervise("http", http.live, STOP, finite=True)
    log.info(
        "serving",
        host=settings.host,
        grpc_port=rpc.port,
        http_port=http.port,
        http=settings.http,
        tls=router.certificates is not None,
        metrics_port=metrics_port,
        health_port=rpc.health_port,
        peer_port=0 if peers is None else peers.port,
    )
    await rpc.set_started()
    readiness = background.supervise("readiness", partial(_keep_readiness, router, rpc), STOP)
    try:
        await background.until(terminated())
    finally:
        readiness.cancel()
        log.info("draining", running=router.core.running, grace_s=settings.drain_grace_s)
        await rpc.set_ready(False)  # first: writing to the store may take long
        await router.core.drain()
        # Other routers read their clients' generations here for as long as these may run.
        servers = (rpc, http) if peers is None else (rpc, http, peers)
        await asyncio.gather(*(server.stop(settings.drain_grace_s) for server in servers))


def _origins(settings: RouterSettings) -> list[str]:
    return [origin.strip() for origin in settings.http_cors_origins.split(",") if origin.strip()]


def _host_names(router: Router, settings: RouterSettings) -> HostNames:
    any_name = not router.entrance.is_open or not is_loopback(settings.host)
    return HostNames(filter(None, map(str.strip, settings.http_hosts.split(","))), any_name=any_name)


def _websocket_face(router: Router, settings: RouterSettings) -> WebSocketFace:
    limits = SocketLimits(
        max_sockets=settings.websocket_max_connections,
        max_streams=settings.tuning.websocket_max_streams,
        max_message_bytes=settings.http_max_body_bytes,
        max_arriving_bytes=max(settings.http_max_arriving_bytes, settings.http_max_body_bytes),
        message_timeout_s=settings.tuning.http_body_timeout_s,
        max_messages=settings.max_messages,
        origins=frozenset(_origins(settings)),
    )
    names = _host_names(router, settings)
    return WebSocketFace(router.core, router.telemetry, router.entrance, limits, hosts=names, tracing=router.tracing)


async def _keep_readiness(router: Router, rpc: RpcServer) -> None:
    """Reports the core's readiness to the gRPC health service as soon as it changes."""
    known = False
    while True:
        if router.core.ready is not known:
            known = router.core.ready
            log.info("readiness", ready=known)
            await rpc.set_ready(known)
        await router.links.changed(timeout_s=5.0)


def main() -> int:
    """Runs the process and returns its exit code."""
    settings = read_settings(RouterSettings)
    collector = CalmCollector(limit_bytes=memory_bytes())
    collector.begin()
    run = partial(_run, collector)
    return run(settings) if settings.processes == 1 else run_processes(settings, run)


def _run(collector: CalmCollector, settings: RouterSettings, heart: Heart | None = None) -> int:
    SpareMemory().start(collector)
    bound = {} if heart is None else {"process": str(heart.number)}
    serving = serve if heart is None else partial(serve, heart=heart)
    return run_service("router", settings, serving, (OSError, RyzansteinError), **bound)


if __name__ == "__main__":
    sys.exit(main())
