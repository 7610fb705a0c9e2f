"""`python -m ryzanstein.router --nodes 127.0.0.1:50061`: settings, the router, its two faces, signals.

Bind, link the nodes, ready as soon as one of them is; SIGTERM: not ready, running streams have the grace to end, stop.
Exit codes: 0 stopped by SIGTERM or SIGINT, 1 it failed (port taken, state unusable, a bug), 2 bad settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp

from ryzanstein import log as logs
from ryzanstein.errors import RyzansteinError
from ryzanstein.metrics import MetricsServer
from ryzanstein.router.assembly import Router, assembled, grpc_face
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.http.app import create_app
from ryzanstein.router.http_face import HttpFace
from ryzanstein.rpc.server import RpcServer, terminated

log = structlog.get_logger(__name__)


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT. OSError, sqlite3.Error, RyzansteinError: it cannot start."""
    async with assembled(settings) as router:
        metrics = MetricsServer(router.telemetry.registry, settings.host, settings.metrics_port)
        try:
            await _serve_faces(router, settings, metrics.port)
        finally:
            metrics.close()
    log.info("stopped")


async def _serve_faces(router: Router, settings: RouterSettings, metrics_port: int) -> None:
    server = grpc_face(router, settings)
    await server.start()
    http = _http_face(router, settings)
    http_port = None if http is None else http.port
    log.info("serving", host=settings.host, grpc_port=server.port, http_port=http_port, metrics_port=metrics_port)
    await server.set_started()
    readiness = asyncio.create_task(_keep_readiness(router, server))
    await terminated()
    readiness.cancel()
    log.info("draining", running=router.core.running, grace_s=settings.drain_grace_s)
    stops = [server.stop(settings.drain_grace_s)] + ([] if http is None else [http.stop()])
    await asyncio.gather(*stops)


def _http_face(router: Router, settings: RouterSettings) -> HttpFace | None:
    if not settings.http:
        return None
    app = create_app(router.core, router.sessions)
    return HttpFace(app, settings.host, settings.http_port, settings.drain_grace_s)


async def _keep_readiness(router: Router, server: RpcServer) -> None:
    """Health says what the core says, from the moment that it changes."""
    known = False
    while True:
        if router.core.ready is not known:
            known = router.core.ready
            log.info("readiness", ready=known)
            await server.set_ready(known)
        await router.links.changed(timeout_s=5.0)


def main() -> int:
    """The process; returns its exit code."""
    try:
        settings = CliApp.run(RouterSettings)
    except ValidationError as error:
        for problem in error.errors():
            print(f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}", file=sys.stderr)
        return 2
    logs.setup("router", settings.log_level)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(settings))
    except (OSError, sqlite3.Error, RyzansteinError) as error:
        log.error("cannot serve", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
