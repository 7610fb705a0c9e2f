"""The middleware of every HTTP request: id, who sent it, bounds on bodies and on concurrency, log line, metric.

It is plain ASGI around the application, so that it also sees errors in the framework.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from ryzanstein import errors
from ryzanstein.auth.caller import ANYONE, Caller
from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.request_id import request_id
from ryzanstein.router.access.entrance import Entrance
from ryzanstein.router.faces.http.arrival import BodyArrival, BodyBounds, ByteBudget, Departure
from ryzanstein.router.faces.http.serving.host_names import HostNames
from ryzanstein.router.faces.openai.answers.failures import CLIENT_CLOSED_REQUEST, HttpRefused, failure_from_error
from ryzanstein.router.faces.origin import RequestOrigin
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

REQUEST_ID = "X-Request-Id"
TRACEPARENT = "traceparent"
_CALL = "ryzanstein.call"
ROUTER_STOPS = errors.unavailable("DRAINING", "the router stops: send the request again", 1.0)
_QUIET = frozenset({"/health", "/healthz", "/readyz"})


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The bounds of the HTTP face.

    They bound the size of a body and of all bodies that are being read, the messages of a body, the
    time until it is complete, the requests at once, the size of all large answers that are being
    written, how long a reader may take no byte of an answer, and how long a stream may be silent:
    then it has a comment, because proxies end what says nothing for a minute. A stream that no node
    has accepted after `max_opening_s` gets its headers; that is more than a request waits for a node.
    """

    max_body_bytes: int = 4 * 2**20
    max_arriving_bytes: int = 128 * 2**20
    max_messages: int = 2048
    body_timeout_s: float = 30.0
    max_requests: int = 8192
    max_leaving_bytes: int = 128 * 2**20
    write_timeout_s: float = 60.0
    max_silence_s: float = 15.0
    max_opening_s: float = 25.0


@dataclass(slots=True)
class HttpCall:
    """A request that is being served.

    `code` is its status, or the outcome of a stream after its status was sent.
    """

    request_id: str
    admitted: Caller | None = None
    code: int = 0
    started: bool = False

    @property
    def caller(self) -> Caller:
        """Who sent it. Raises LookupError for a request that nobody let in: it is never anybody's by accident."""
        if self.admitted is None:
            raise LookupError("the request was not let in")
        return self.admitted

    @property
    def origin(self) -> RequestOrigin:
        return RequestOrigin(self.caller, self.request_id)

    @property
    def tenant(self) -> str:
        """The tenant of the caller, empty if it names none."""
        return self.caller.tenant


def call_of(scope: Scope) -> HttpCall:
    """Returns the call that the gate opened for this request."""
    call: HttpCall = scope[_CALL]
    return call


class Gate:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: HttpLimits,
        telemetry: RouterTelemetry,
        entrance: Entrance,
        hosts: HostNames,
        tracing: Tracing,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._entrance = entrance
        self._limits = limits
        self._telemetry, self._tracing = telemetry, tracing
        self._bounds = BodyBounds(limits.max_body_bytes, limits.body_timeout_s)
        self._arriving = ByteBudget(limits.max_arriving_bytes)
        self._leaving = ByteBudget(limits.max_leaving_bytes)
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = scope[_CALL] = HttpCall(request_id(Headers(scope=scope).get(REQUEST_ID, "")))
        began, span = time.monotonic(), self._traced(scope)
        self._running += 1
        with bound_contextvars(request_id=call.request_id):
            try:
                await self._serve(scope, receive, _labelled(send, call, self._entrance.limits_shown), call)
            except BaseException:
                call.code = call.code if call.code >= 400 else CLIENT_CLOSED_REQUEST
                raise
            finally:
                self._running -= 1
                self._ended(scope, call, time.monotonic() - began)
                span.set_attribute("http.response.status_code", call.code)
                span.end()

    def _traced(self, scope: Scope) -> Span:
        """Begins the span of a request, which becomes the one that the application sees as its client's."""
        if scope["path"] in _QUIET:
            return INVALID_SPAN
        headers = MutableHeaders(scope=scope)
        received = headers.get(TRACEPARENT, "")
        about = {"http.request.method": scope["method"], "url.path": scope["path"][:256]}
        span = self._tracing.start(scope["method"], received, about, kind=SpanKind.SERVER)
        if span.is_recording():
            headers[TRACEPARENT] = traceparent(span, received)
        return span

    async def _serve(self, scope: Scope, receive: Receive, send: Send, call: HttpCall) -> None:

        async def refuse(refused: HttpRefused) -> None:
            self._telemetry.http_refused.labels(refused.reason).inc()
            await refused.failure.response()(scope, receive, send)

        try:
            if self._running > self._limits.max_requests:
                raise errors.queue_full(self._running, self._limits.max_requests)
            call.admitted = self._let_in(scope)
            with BodyArrival(receive, Headers(scope=scope), self._bounds, self._arriving) as arrival:
                departure = Departure(send, refuse, self._leaving, self._limits.write_timeout_s)
                await self._app(scope, arrival.receive, departure.send)
        except HttpRefused as refused:
            await refuse(refused)
        except asyncio.CancelledError:  # the server stops, and its grace is over
            if not call.started:
                await failure_from_error(ROUTER_STOPS).response()(scope, receive, send)
            raise
        except Exception as error:
            if call.started:
                if not isinstance(error, OSError):  # the client is gone or does not read
                    log.exception("response failed", method=scope["method"], path=scope["path"][:256])
                raise
            await failure_from_error(_domain_error(error, scope, call)).response()(scope, receive, send)

    def _let_in(self, scope: Scope) -> Caller:
        """Returns who sends the request, before a byte of a body is read.

        Raises what `Entrance.admit_route` and `HostNames.check` raise.
        """
        if scope["path"] not in _QUIET:  # probes may come by any name
            self._hosts.check(Headers(scope=scope).get("host", ""))
        if scope["method"] == "OPTIONS":  # no route has it: CORS answers it, or it is not allowed
            return ANYONE
        headers = ((name.decode("latin-1"), value) for name, value in scope["headers"])
        return self._entrance.admit_route(scope["method"], scope["path"], headers)

    def _ended(self, scope: Scope, call: HttpCall, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        self._telemetry.request_ended("http", route, str(call.code), duration_s)
        if route not in _QUIET:
            log.info(
                "http request",
                method=scope["method"],
                path=scope["path"][:256],
                code=call.code,
                duration_s=round(duration_s, 6),
            )


def _domain_error(error: Exception, scope: Scope, call: HttpCall) -> errors.RyzansteinError:
    """Returns what the client is told of an error: of a bug, which is logged, only the request's id."""
    if isinstance(error, errors.RyzansteinError):
        return error
    log.exception("request failed", method=scope["method"], path=scope["path"][:256])
    return errors.internal(f"internal error, request {call.request_id}")


def _labelled(send: Send, call: HttpCall, limits_shown: Callable[[str], Mapping[str, str]]) -> Send:
    """Returns a `send` that adds the request id and what is left of limits to the response, and records its status."""

    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.started, call.code = True, message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID] = call.request_id
            headers.update(limits_shown(call.tenant) if call.admitted is not None else {})
        await send(message)

    return labelled
