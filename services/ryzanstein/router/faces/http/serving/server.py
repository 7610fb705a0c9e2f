"""The HTTP server in the router's own event loop: bind, serve, drain, stop.

The router handles signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from ryzanstein.addresses import join_address
from ryzanstein.router.faces.http.serving.connections import ConnectionBounds, Connections
from ryzanstein.router.faces.http.serving.protocol import BoundedProtocol, whole_answer
from ryzanstein.router.faces.http.serving.upgrade import SocketUpgrades
from ryzanstein.router.faces.openai.answers.failures import HttpFailure
from ryzanstein.rpc.tls.listener import Handshakes, TlsListener

_BACKLOG = 4096
_SWEEP_S = 5
_FAREWELL_S = 1.0


_NO_TLS = HttpFailure(400, "this port speaks HTTPS: use https://", None, "tls_required")


class _QuietServer(uvicorn.Server):
    """A uvicorn server without its signal handlers, and with TLS of our own.

    The handlers would take SIGTERM away from the router's drain. uvicorn's TLS bounds no handshakes,
    and keeps the certificates that it began with.
    """

    def __init__(self, config: uvicorn.Config, tls: Handshakes | None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens. With TLS it does what uvicorn does for given sockets, with another listener."""
        if self._tls is None:
            await super().startup(sockets)
            return
        listeners = [TlsListener(each, self._tls, self._protocol, whole_answer(_NO_TLS)) for each in sockets or ()]
        for listener in listeners:
            listener.start(_BACKLOG)
        self.servers: Any = listeners
        self.started = True

    def _protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[no-any-return]


class HttpServer:
    """The HTTP server of a router.

    After `start`, `port` is the bound port; `stop` ends the server. `on_refused` is called with the
    reason for which a connection was refused. `upgrades` takes over connections that ask for it.
    With `tls` it speaks HTTPS alone. If it `shares_port`, other processes may listen there too.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        bounds: ConnectionBounds | None = None,
        on_refused: Callable[[str], object] = lambda reason: None,
        *,
        upgrades: SocketUpgrades | None = None,
        tls: Handshakes | None = None,
        shares_port: bool = False,
    ) -> None:
        self._host, self._shares_port = host, shares_port
        bounds = bounds or ConnectionBounds()
        self._stuck: set[asyncio.Transport] = set()
        # The gate has logged a failed request, once and as JSON; uvicorn would log its stack again,
        # as text.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            http=partial(BoundedProtocol, Connections(bounds, on_refused), upgrades),  # type: ignore[arg-type]
            timeout_keep_alive=round(bounds.keep_alive_s),
            callback_notify=self._drop_stuck,
            timeout_notify=_SWEEP_S,
            backlog=_BACKLOG,
            ws="none",
        )
        self._server = _QuietServer(self._config, tls)
        self._serving: asyncio.Task[None] | None = None
        self.port = port

    async def start(self) -> None:
        """Binds and serves. Raises OSError when the port is taken."""
        listener = self._bind()
        self.port = listener.getsockname()[1]
        self._serving = asyncio.create_task(self._serve(listener))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._serving.done():
                self._serving.result()

    async def _serve(self, listener: socket.socket) -> None:
        """Serves until the server ends, then closes its sockets.

        However it ends, no client connects to a server that does not answer.
        """
        try:
            await self._server.serve(sockets=[listener])
        finally:
            for server in getattr(self._server, "servers", ()):
                server.close()
            listener.close()

    async def live(self) -> None:
        """Returns when the server has stopped because `stop` was called.

        Raises RuntimeError, or the server's own error, when it ended for another reason. Cancelling
        this wait does not stop the server.
        """
        if self._serving is not None:
            await asyncio.shield(self._serving)
            if not self._server.should_exit:
                raise RuntimeError("the HTTP server ended unexpectedly")

    async def stop(self, grace_s: float) -> None:
        """Stops the server.

        It accepts no new connections. Running requests have `grace_s` to end, then they are
        cancelled.
        """
        if self._serving is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.wait([self._serving])  # `live` has reported its error
        # What was cancelled after the grace still tells its clients.
        if self._server.server_state.tasks:
            await asyncio.wait(self._server.server_state.tasks, timeout=_FAREWELL_S)

    async def _drop_stuck(self) -> None:
        """Aborts connections that were already closing at the last sweep.

        A closing connection waits for its client to read the rest, but not forever.
        """
        transports = {connection.transport for connection in self._server.server_state.connections}
        closing = {transport for transport in transports if transport.is_closing()}
        for transport in closing & self._stuck:
            transport.abort()
        self._stuck = closing

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self._shares_port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # as gRPC does: `::` takes IPv4 too
            listener.bind((self._host, self.port))
        except OSError as error:
            listener.close()
            raise OSError(f"cannot listen on {join_address(self._host, self.port)}: {error.strerror}") from None
        return listener
