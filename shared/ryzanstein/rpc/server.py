"""The lifecycle of a gRPC server: bind, warm up, SERVING; on SIGTERM NOT_SERVING, drain, stop.

Health services by name: `""` the process is alive, `readiness` it accepts work, `startup` it has
started up once. A node that uses a server beside it also has `engine`: that server need not be restarted.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ryzanstein.addresses import join_address
from ryzanstein.rpc.guard import Guard
from ryzanstein.rpc.health_port import HealthPort
from ryzanstein.rpc.http2.serving.server import Http2Server, ServerBounds
from ryzanstein.rpc.interceptors import ErrorInterceptor, RpcMetrics
from ryzanstein.rpc.reading import RequestReading
from ryzanstein.rpc.reflection import enable_reflection

if TYPE_CHECKING:
    from ryzanstein.rpc.tls.port_certificates import PortCertificates
    from ryzanstein.rpc.tls.service_tls import ServiceTls

MAX_MESSAGE_BYTES = 16 * 2**20
READINESS = "readiness"
STARTUP = "startup"
ENGINE = "engine"

# How often a client may ping, with or without calls: see docs/operate/configure.md. The server permits
# twice as many pings, so that a late ping does not make the next one too early.
CLIENTS_PING_S = 10.0

# A connection whose handshake takes longer is closed; gRPC's default is two minutes.
_HANDSHAKE_MS = 10_000

# A call that nobody has read yet waits for its own deadline. gRPC cancels it after 30 s by default, without a reason. Calls are
# read one after the other: with many new ones a client would take that for the loss of the server.
_UNREAD_CALL_S = 3600

# As many calls may wait to be read. Of more than a thousand gRPC by default cancels some by chance, also without a reason, and
# a server reads only one in each pass of its loop.
_UNREAD_CALLS = 8192

# Processes that share a port get connections by chance. After this time, a tenth more or less, a client is asked to open
# another one for its next calls; those that run go on.
_SHARED_AGE_MS = 600_000

_HALF_SENT_BYTES = 64 * 2**20

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(
    clients_ping_s: float = CLIENTS_PING_S,
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    max_connections: int | None = None,
    *,
    shares_port: bool = False,
) -> tuple[tuple[str, int], ...]:
    """Returns the server's channel options.

    A client that pings more often than permitted gets GOAWAY, which kills every request on its
    channel; gRPC's default permits a ping every 5 minutes. gRPC silently ignores option names that
    it does not know.
    """
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", round(500 * clients_ping_s)),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", int(shares_port)),
        *((("grpc.max_connection_age_ms", _SHARED_AGE_MS),) if shares_port else ()),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.server_max_unrequested_time_in_server", _UNREAD_CALL_S),
        ("grpc.server.max_pending_requests", _UNREAD_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _UNREAD_CALLS),
        *((("grpc.max_allowed_incoming_connections", max_connections),) if max_connections else ()),
    )


class RpcServer:
    """A gRPC server with health, reflection and the error interceptor.

    Add servicers to `.server` before `start`. After it `port` is the bound port (useful with port 0).
    `clients_ping_s` is how often a client may ping. It ends a request of more than
    `max_request_bytes`, and a call beyond `max_calls` at once, with RESOURCE_EXHAUSTED before it is read.
    `guard` says who may call what, by default everybody everything. `metrics` measures the calls, none by
    default. With `tls` it listens on the port of that too, or where TLS is required on that alone: `port`
    is then the same as `tls_port`. With `health_port` its health is also answered there, without TLS.
    `certificates` are for clients without any: with them `port` has TLS. Connections beyond
    `max_connections` are closed; the builtin server takes 1,024 in their handshake besides. If it `shares_port`, other
    processes may listen there too.
    Its ports are the `builtin` server's (`rpc.http2.serving`), or the library's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        clients_ping_s: float = CLIENTS_PING_S,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        max_calls: int | None = None,
        reading: RequestReading | None = None,
        metrics: RpcMetrics | None = None,
        guard: Guard | None = None,
        tls: ServiceTls | None = None,
        health_port: int | None = None,
        certificates: PortCertificates[Any] | None = None,
        max_connections: int | None = None,
        shares_port: bool = False,
        builtin: bool = True,
    ) -> None:
        interceptors = [ErrorInterceptor(reading or RequestReading(), guard, metrics), *_guards(tls)]
        self.server: Any
        if builtin:
            bounds = ServerBounds(
                max_request_bytes=max_request_bytes,
                max_response_bytes=MAX_MESSAGE_BYTES,
                max_half_sent_bytes=max(_HALF_SENT_BYTES, 4 * max_request_bytes),
                max_calls=max_calls or _UNREAD_CALLS,
                min_ping_interval_s=clients_ping_s / 2,
                handshake_s=_HANDSHAKE_MS / 1000,
                max_connections=max_connections or 0,
                max_age_s=_SHARED_AGE_MS / 1000 if shares_port else 0.0,
            )
            self.server = Http2Server(interceptors, bounds, shares_port=shares_port)
        else:
            options = server_options(clients_ping_s, max_request_bytes, max_connections, shares_port=shares_port)
            self.server = _library_server(interceptors, options, max_calls)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        enable_reflection((*service_names, health.SERVICE_NAME), self.server)
        self._health_port = None if health_port is None else HealthPort(host, health_port, self._health)
        self._host, self._port, self._tls, self._certificates = host, port, tls, certificates
        self._metrics = metrics
        self.port = self.tls_port = 0

    @property
    def health_port(self) -> int:
        """The bound port for probes; 0 if there is none."""
        return 0 if self._health_port is None else self._health_port.port

    async def start(self) -> None:
        """Binds and serves. Readiness and startup are NOT_SERVING until set.

        Raises OSError if the port is taken.
        """
        if self._tls is None or not self._tls.required:
            self.port = await self._bound("public", self._port, self._certificates)
        if self._tls is not None:
            self.tls_port = await self._bound("services", self._tls.port, self._tls.certificates())
            self.port = self.port or self.tls_port
        await self._health.set("", _SERVING)
        await self.set_ready(False)
        await self._health.set(STARTUP, _NOT_SERVING)
        if self._health_port is not None:
            await self._start_health(self._health_port)
        await self.server.start()

    async def _start_health(self, health_port: HealthPort) -> None:
        try:
            await health_port.start()
        except OSError:
            await self.server.stop(None)
            raise

    async def _bound(self, kind: str, port: int, certificates: PortCertificates[Any] | None = None) -> int:
        address = join_address(self._host, port)
        try:
            if certificates is None:
                return int(self.server.add_insecure_port(address))
            if isinstance(self.server, Http2Server):
                certificates.context()  # one that cannot be used ends the start
                counts = None if self._metrics is None else self._metrics.handshakes(kind)
                return self.server.add_tls_port(address, certificates.context, counts)
            return int(self.server.add_secure_port(address, certificates.credentials()))
        except (RuntimeError, OSError) as error:
            await self.server.stop(None)
            raise OSError(f"cannot listen on {address}: {error}") from None

    async def set_started(self) -> None:
        await self._health.set(STARTUP, _SERVING)

    async def set_ready(self, ready: bool) -> None:
        await self._health.set(READINESS, _SERVING if ready else _NOT_SERVING)

    async def set_engine(self, sound: bool) -> None:
        await self._health.set(ENGINE, _SERVING if sound else _NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING at once, accepts no new calls, and gives running calls `grace_s`.

        The port for probes reports it for as long.
        """
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)
        if self._health_port is not None:
            await self._health_port.stop()


def _library_server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Any, max_calls: int | None) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=max_calls)
    # gRPC waits for the calls of each registered method apart, and begins all these waits again with every call: with 25
    # methods that is a part of a short request's cost. Without registered methods it waits once for all.
    setattr(server, "add_registered_method_handlers", lambda service_name, method_handlers: None)  # noqa: B010
    return server


def _guards(tls: ServiceTls | None) -> list[grpc.aio.ServerInterceptor]:
    """Returns what admits peers. It is loaded only with TLS, which needs a package of its own."""
    if tls is None:
        return []
    from ryzanstein.rpc.tls.peer_guard import PeerInterceptor

    return [PeerInterceptor(tls.guard)]


async def terminated() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
