"""The door of the router's public faces: who calls, and may they call this.

All faces ask here, before they read a body: gRPC for each call, HTTP for each request, and a WebSocket
at its handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry

from ryzanstein.auth import refusals
from ryzanstein.auth.caller import ANYONE, Caller
from ryzanstein.auth.credential import Credential
from ryzanstein.auth.rules import PUBLIC_METHODS, Need, need_of_route
from ryzanstein.errors import RyzansteinError
from ryzanstein.observe.labelled import LabelledCounter
from ryzanstein.router.access.authenticator import Authenticator
from ryzanstein.router.access.live import LiveCallers
from ryzanstein.router.access.telemetry import outcome_of

GRPC, HTTP, WEBSOCKET = "grpc", "http", "websocket"
_Headers = Iterable[tuple[str, str | bytes]]


class Entrance:
    """Authenticates and authorizes calls. `live` has the callers with open streams and sockets."""

    def __init__(
        self,
        authenticator: Authenticator,
        registry: CollectorRegistry,
        shown: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        self._authenticator = authenticator
        self.limits_shown = shown
        """Returns the headers that tell a tenant what is left of its limits."""
        self._outcomes = LabelledCounter(
            "ryzanstein_router_auth_total",
            "Requests at the door, by face and outcome: key, token, anonymous, or why one was refused",
            ("face", "outcome"),
            registry=registry,
        )
        self.live = LiveCallers(self.ended, registry)

    @property
    def is_open(self) -> bool:
        """Whether callers without a credential are let in."""
        return self._authenticator.is_open

    def admit(self, method: str, metadata: _Headers) -> Caller:
        """Returns who makes a gRPC call. Raises UNAUTHENTICATED, PERMISSION_DENIED, or UNAVAILABLE KEYS_UNAVAILABLE."""
        return self._let_in(GRPC, PUBLIC_METHODS.get(method), metadata)

    def admit_route(self, method: str, path: str, headers: _Headers) -> Caller:
        """Returns who sends a request to a route, which the table may not have: then it needs some caller, and is not found."""
        return self._let_in(HTTP, need_of_route(method, path) or Need(), headers)

    def admit_socket(self, path: str, headers: _Headers, also: str) -> Caller:
        """Returns who opens a WebSocket. `also` is the key of a subprotocol, for browsers, which cannot set headers."""
        return self._let_in(WEBSOCKET, need_of_route("GET", path), headers, also)

    def ended(self, caller: Caller) -> RyzansteinError | None:
        """Returns why a caller that was let in would be refused now; None if it would not."""
        return self._authenticator.ended(caller)

    def _let_in(self, face: str, need: Need | None, headers: _Headers, also: str = "") -> Caller:
        if need is not None and need.is_open:
            return ANYONE
        try:
            if need is None:
                raise refusals.not_allowed()
            caller = self._authenticator.authenticate(Credential.read(headers, also))
            caller.check_scope(need.scope)
        except RyzansteinError as error:
            self._outcomes.labels(face, outcome_of(error)).inc()
            raise
        self._outcomes.labels(face, outcome_of(caller)).inc()
        return caller
