"""A port without TLS that answers health checks and nothing else, for probes that have no certificate.

It serves the one method `Check`. `Watch` is a stream for as long as its client likes: a few of them
would take the places of the probes. The library's server has neither bound nor message parser of
ours here, so the requests are read below.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from ryzanstein.addresses import join_address

MAX_HEALTH_CALLS = 32
MAX_HEALTH_CONNECTIONS = 64
MAX_HEALTH_REQUEST_BYTES = 1024
"""A request is the name of a service."""

_IDLE_MS = 10_000
_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", MAX_HEALTH_CONNECTIONS),
    ("grpc.max_receive_message_length", MAX_HEALTH_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", MAX_HEALTH_CALLS),
    # A probe opens a connection for each check. Who keeps one has no place for long.
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.max_connection_age_ms", 6 * _IDLE_MS),
    ("grpc.server_handshake_timeout_ms", _IDLE_MS),
    ("grpc.so_reuseport", 0),
)


class Checks(Protocol):
    """Where the states of the services are; see the library's `HealthServicer`."""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Returns the state of one service. Ends the call with NOT_FOUND for one that is unknown."""
        ...


class HealthPort:
    """A server of health checks at host:port; 0 is a free port. `port` is the bound one after `start`.

    `checks` are those of the service's own server, so both say the same at any time.
    """

    def __init__(self, host: str, port: int, checks: Checks) -> None:
        self._address, self._checks = join_address(host, port), checks
        self._server = grpc.aio.server(interceptors=[], options=_OPTIONS, maximum_concurrent_rpcs=MAX_HEALTH_CALLS)
        check: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            self._check, None, health_pb2.HealthCheckResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),))
        self.port = 0

    async def start(self) -> None:
        """Binds and serves. Raises OSError if the port is taken."""
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            await self._server.stop(None)
            raise OSError(f"cannot listen on {self._address}: {error}") from None
        await self._server.start()

    async def stop(self) -> None:
        """Closes the port and its connections."""
        await self._server.stop(None)

    async def _check(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> health_pb2.HealthCheckResponse:
        try:
            wanted = health_pb2.HealthCheckRequest.FromString(request)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a HealthCheckRequest")
        return await self._checks.Check(wanted, context)
