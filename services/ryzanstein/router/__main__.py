"""Starts a router: `python -m ryzanstein.router --nodes 127.0.0.1:50061`.

Bind, link the nodes, ready when one of them is; SIGTERM: not ready, running streams have the grace to end, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import structlog
import uvloop

from ryzanstein import log as logs
from ryzanstein.metrics import MetricsServer
from ryzanstein.router.assembly import Router, assembled, grpc_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.http.app import create_app
from ryzanstein.router.http_face import HttpFace
from ryzanstein.rpc.server import RpcServer, terminated

log = structlog.get_logger(__name__)


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT. OSError: a port is taken."""
    async with assembled(settings) as router:
        metrics = MetricsServer(router.telemetry.registry, settings.host, settings.metrics_port)
        server = grpc_face(router, settings)
        http = _http_face(router, settings)
        await server.start()
        if http is not None:
            http.start()
        http_port = None if http is None else http.port
        log.info("router serves", grpc_port=server.port, http_port=http_port, metrics_port=metrics.port)
        await server.set_started()
        readiness = asyncio.create_task(_keep_readiness(router, server))
        await terminated()
        log.info("router drains", running=router.core.running, grace_s=settings.drain_grace_s)
        readiness.cancel()
        stops = [server.stop(settings.drain_grace_s)] + ([] if http is None else [http.stop()])
        await asyncio.gather(*stops)
        metrics.close()
    log.info("router stopped")


def _http_face(router: Router, settings: RouterSettings) -> HttpFace | None:
    if not settings.http:
        return None
    return HttpFace(create_app(router.core, router.sessions), settings.host, settings.http_port, settings.drain_grace_s)


async def _keep_readiness(router: Router, server: RpcServer) -> None:
    """Health says what the core says, from the moment that it changes."""
    known = False
    while True:
        if router.core.ready is not known:
            known = router.core.ready
            log.info("router readiness", ready=known)
            await server.set_ready(known)
        await router.links.changed(timeout_s=5.0)


def main() -> None:
    settings = RouterSettings(_cli_parse_args=sys.argv[1:], _cli_prog_name="ryzanstein router")
    logs.setup("router", settings.log_level)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
