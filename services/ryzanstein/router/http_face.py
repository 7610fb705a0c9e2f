"""uvicorn in the router's own process and event loop: both faces share one core. Signals are the process's business."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn._types import ASGIApplication


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFace:
    """Serves an ASGI application from its making to `stop`. `port` is the bound one (useful with port 0)."""

    def __init__(self, app: ASGIApplication, host: str, port: int, drain_grace_s: float) -> None:
        """OSError: the port is taken."""
        self._socket = socket.create_server((host, port), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=max(1, round(drain_grace_s)),
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    async def stop(self) -> None:
        """No new connections; running requests have the grace to end."""
        self._server.should_exit = True
        await self._task
        self._socket.close()
