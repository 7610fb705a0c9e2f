"""The WebSocket face of a router: `GET /v1/ws`, subprotocol `ryzanstein.v1`. See docs/build/websocket.md."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.tracing import Tracing
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.arrival import ByteBudget
from ryzanstein.router.faces.http.serving.host_names import HostNames
from ryzanstein.router.faces.http.serving.upgrade import UpgradeRequest
from ryzanstein.router.faces.openai.answers.failures import ACCESS, CONNECTIONS, HttpFailure, HttpRefused, failure_from_error
from ryzanstein.router.faces.websocket.connection import ConnectionParts, WebSocketConnection
from ryzanstein.router.faces.websocket.conversation import Conversation
from ryzanstein.router.faces.websocket.handshake import accepted, key_of_subprotocols
from ryzanstein.router.faces.websocket.limits import CloseCode, SocketLimits
from ryzanstein.router.faces.websocket.requests import SocketRequests
from ryzanstein.router.faces.websocket.telemetry import SocketTelemetry
from ryzanstein.router.faces.websocket.turns import ParsingTurns
from ryzanstein.router.telemetry import RouterTelemetry

_FULL = HttpFailure(503, "too many WebSockets", None, "too_many_connections", {"Retry-After": "1"})
# Codes below 3000 are those of RFC 6455, those from 4000 on are ours; others are a client's invention.
_OTHER = "other"


class WebSocketFace:
    """The sockets of a router, over its core."""

    path = "/v1/ws"

    def __init__(
        self,
        core: Core,
        telemetry: RouterTelemetry,
        entrance: Entrance,
        limits: SocketLimits | None = None,
        *,
        hosts: HostNames | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._core = core
        self._entrance = entrance
        self._hosts = hosts or HostNames(any_name=True)
        self._limits = limits or SocketLimits()
        self._telemetry, self._tracing = SocketTelemetry(telemetry), tracing or Tracing("router")
        self._parts = ConnectionParts(self._limits, ByteBudget(self._limits.max_arriving_bytes), ParsingTurns())
        self._requests = SocketRequests(self._limits.max_messages)
        self._num_open = 0

    def upgraded(self, request: UpgradeRequest) -> asyncio.Protocol:
        """Returns the protocol of a new socket, whose caller stays the same. Raises HttpRefused."""
        headers = Headers(raw=[(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers])
        self._hosts.check(headers.get("host", ""))
        try:
            caller = self._entrance.admit_socket(self.path, headers.items(), key_of_subprotocols(headers))
        except RyzansteinError as error:
            raise HttpRefused(failure_from_error(error), ACCESS) from None
        if self._num_open >= self._limits.max_sockets:
            raise HttpRefused(_FULL, CONNECTIONS)
        parser = accepted(request, self._limits)

        def lost() -> None:
            leave()
            self._num_open -= 1
            self._telemetry.open.dec()
            self._telemetry.closed.labels(_label(connection.close_code)).inc()
            request.closed()

        connection = WebSocketConnection(parser, self._parts, request.server, lost)
        leave = self._entrance.live.enter(caller, lambda error: connection.close(CloseCode.KEY_ENDED, error.message))
        conversation = Conversation(
            connection=connection,
            core=self._core,
            requests=self._requests,
            limits=self._limits,
            headers=headers,
            caller=caller,
            telemetry=self._telemetry,
            tracing=self._tracing,
        )
        self._num_open += 1
        self._telemetry.open.inc()
        task = self._telemetry.background.once("websocket", conversation.run())
        request.server.tasks.add(task)
        task.add_done_callback(request.server.tasks.discard)
        return connection


def _label(code: int) -> str:
    return str(code) if 1000 <= code < 1016 or 4000 <= code < 4010 else _OTHER
