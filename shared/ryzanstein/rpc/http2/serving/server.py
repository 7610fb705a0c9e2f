"""A server of gRPC on the event loop: handlers, ports, and its stop. Has the part of `grpc.aio.Server` that is used here.

It has no threads: a request is read, handled and answered in the loop, and what one pass of uvloop's loop writes to a
connection leaves in one write. A connection with TLS is known to it once its handshake is complete.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from ryzanstein.addresses import host_of
from ryzanstein.rpc.http2.serving.call import CallDetails, ServerCall
from ryzanstein.rpc.http2.serving.connection import DRAIN_S, ServerConnection
from ryzanstein.rpc.http2.serving.half_sent import HalfSentMessages
from ryzanstein.rpc.http2.serving.listening import bound_sockets
from ryzanstein.rpc.tls.handshake_counts import HandshakeCounts
from ryzanstein.rpc.tls.listener import HandshakeBounds, Handshakes, TlsListener

_BACKLOG = 4096
# A token that has arrived passes through a few callbacks, each in a pass of its own, and a call's start takes as long as all of
# them. With each start alone, calls wait without need; with all at once, tokens do.
_STARTS, _PASSES = 8, 8
_AGE_JITTER = 0.1
_STOP_LOOK_S, _CLEANUP_S, _LINGER_S = 0.02, 5.0, 1.0
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 60.0, 20.0


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """What one server takes. Times are seconds, 0 of `max_connections` and `max_age_s` is no bound.

    `max_half_sent_bytes`: of unfinished messages, over all calls.
    `max_age_s`: after it, a tenth more or less, a client is asked to open another connection.
    """

    max_request_bytes: int
    max_response_bytes: int
    max_calls: int
    min_ping_interval_s: float
    handshake_s: float
    max_half_sent_bytes: int = 64 * 2**20
    max_connections: int = 0
    max_age_s: float = 0.0


class Http2Server:
    """Add handlers and ports, then `start` it, and `stop` it at the end."""

    def __init__(self, interceptors: Sequence[Any], bounds: ServerBounds, *, shares_port: bool = False) -> None:
        self._interceptors, self._bounds, self._shares_port = interceptors, bounds, shares_port
        self.max_message_bytes, self.max_response_bytes = bounds.max_request_bytes, bounds.max_response_bytes
        # One more than there may be calls: a client then hears why.
        self.max_streams = bounds.max_calls + 1
        self.min_ping_interval_s, self.handshake_s = bounds.min_ping_interval_s, bounds.handshake_s
        self.keepalive_s, self.keepalive_timeout_s = _KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S
        self.half_sent = HalfSentMessages(bounds.max_half_sent_bytes)
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._sockets: list[socket.socket] = []
        self._tls_sockets: list[tuple[socket.socket, Handshakes]] = []
        self._servers: list[asyncio.Server | TlsListener] = []
        self._listening: list[socket.socket] = []
        self._connections: dict[ServerConnection, asyncio.TimerHandle | None] = {}
        self._calls: dict[asyncio.Task[None], ServerCall] = {}
        self._new: deque[ServerCall] = deque()
        self._find: Callable[[CallDetails], Any] = self._handler_of
        for interceptor in reversed(interceptors):
            self._find = _intercepted(interceptor, self._find)
        self.stopping = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._generic.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """They are also among the generic handlers."""

    def add_insecure_port(self, address: str) -> int:
        """Binds host:port and returns the port. Raises RuntimeError, as gRPC does, if it is taken."""
        sockets = self._bound(address)
        self._sockets += sockets
        return int(sockets[0].getsockname()[1])

    def add_tls_port(self, address: str, context: Callable[[], ssl.SSLContext], metrics: HandshakeCounts | None = None) -> int:
        """Binds host:port for connections with TLS, each with the context as it is then; as `add_insecure_port`."""
        sockets = self._bound(address)
        tls = Handshakes(context, metrics, HandshakeBounds(timeout_s=self.handshake_s), DRAIN_S)
        self._tls_sockets += [(sock, tls) for sock in sockets]
        return int(sockets[0].getsockname()[1])

    def _bound(self, address: str) -> list[socket.socket]:
        try:
            port = address.rpartition(":")[2]
            return bound_sockets(host_of(address), int(port), shares_port=self._shares_port)
        except (OSError, ValueError) as error:
            raise RuntimeError(str(error)) from None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._servers.append(await loop.create_server(lambda: ServerConnection(self), sock=sock, backlog=_BACKLOG))
        for sock, tls in self._tls_sockets:
            listener = TlsListener(sock, tls, lambda: ServerConnection(self))
            listener.start(_BACKLOG)
            self._servers.append(listener)
            self._listening.append(sock)
        self._sockets, self._tls_sockets = [], []

    async def stop(self, grace: float | None) -> None:
        """Takes no new connections, gives running calls `grace` seconds to end and to be read, and ends the rest."""
        self.stopping = True
        self._listen_no_more()
        for connection in list(self._connections):
            connection.go_away()
        await _until(lambda: not any(each.busy for each in self._connections), grace or 0.0)
        while self._new:
            self._start(self._new.popleft())
        for call in list(self._calls.values()):
            call.end(grpc.StatusCode.UNAVAILABLE, "the server stops")
        if self._calls:
            await asyncio.wait(self._calls, timeout=_CLEANUP_S)
        for connection in list(self._connections):
            connection.close()
        await _until(lambda: not self._connections, _LINGER_S)  # clients read what was written, and close
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    def _listen_no_more(self) -> None:
        for sock in (*self._sockets, *(sock for sock, _ in self._tls_sockets)):
            sock.close()
        for server in self._servers:
            server.close()
        for sock in self._listening:
            sock.close()

    # What connections ask.

    def joined(self, connection: ServerConnection) -> bool:
        """Implements `Host`."""
        most, age_s = self._bounds.max_connections, self._bounds.max_age_s
        if self.stopping or (most and len(self._connections) >= most):
            return False
        timer = None
        if age_s:
            age_s *= random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            timer = asyncio.get_running_loop().call_later(age_s, connection.go_away)
        self._connections[connection] = timer
        return True

    def left(self, connection: ServerConnection) -> None:
        """Implements `Host`."""
        timer = self._connections.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def begin(self, call: ServerCall) -> bool:
        """Implements `Host`. A call that was cancelled counts until its handler has ended."""
        if len(self._calls) + len(self._new) >= self._bounds.max_calls:
            return False
        self._new.append(call)
        if len(self._new) == 1:
            asyncio.get_running_loop().call_soon(self._start_some, 1)
        return True

    def _start_some(self, passes: int = 0) -> None:
        """Starts a few calls, and lets some passes of the loop go by: in these, the answers of those that run are passed on."""
        loop = asyncio.get_running_loop()
        if passes > 0:
            loop.call_soon(self._start_some, passes - 1)
            return
        for _ in range(min(_STARTS, len(self._new))):
            self._start(self._new.popleft())
        if self._new:
            loop.call_soon(self._start_some, _PASSES)

    def _start(self, call: ServerCall) -> None:
        if call.done():  # its client has left it
            return
        task = asyncio.get_running_loop().create_task(call.run())
        call.start(task)
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)

    async def handler(self, details: CallDetails) -> Any:
        """Implements `Handlers`."""
        return await self._find(details)

    async def _handler_of(self, details: CallDetails) -> Any:
        if (known := self._handlers.get(details.method)) is not None:
            return known
        for each in self._generic:
            if (found := each.service(details)) is not None:
                self._handlers[details.method] = found
                return found
        return None


def _intercepted(interceptor: Any, continuation: Callable[[CallDetails], Any]) -> Callable[[CallDetails], Any]:
    async def intercept(details: CallDetails) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return intercept


async def _until(true: Callable[[], bool], within_s: float) -> None:
    """Returns when it is true, or the time is over."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not true() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 (what it waits for are counts)
        await asyncio.sleep(_STOP_LOOK_S)
