"""Turns errors into statuses, and gives each call its request id, log line and trace context.

Servicers raise domain errors. Any other exception is our bug: the client gets INTERNAL with the
request id, and the log gets the stack.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry
from structlog.contextvars import bind_contextvars

from ryzanstein import errors
from ryzanstein.auth.caller import Caller
from ryzanstein.observe.labelled import LabelledCounter, LabelledGauge, LabelledHistogram
from ryzanstein.observe.metrics import DURATION_BUCKETS
from ryzanstein.request_id import request_id as valid_request_id
from ryzanstein.rpc import status
from ryzanstein.rpc.guard import Guard, let_in, refusing
from ryzanstein.rpc.reading import ReadableRequests, RequestReading, malformed_requests, readable
from ryzanstein.rpc.tls.handshake_counts import HandshakeCounts

log = structlog.get_logger(__name__)

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
_QUIET = ("/grpc.health.v1.", "/grpc.reflection.")
# Calls that are polled, or open as long as a service lives: their lines would hide those of requests.
_POLLED = ("/GetStatus", "/GetRouterStatus", "/ListRouters", "/ListNodes", "/ListModels", "/WatchCluster")


class RpcMetrics:
    """Built once with a service's registry, for all its servers.

    The label `method` is the service's name and the method's, as in `WorkerService/GetStatus`. Only methods that exist are
    counted, so there are few.
    """

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self.malformed = malformed_requests(service, registry)
        self._prefix, self._registry = f"ryzanstein_{service}_rpc_tls", registry
        self._handshakes: tuple[LabelledCounter, LabelledCounter] | None = None
        self._seconds = LabelledHistogram(
            f"ryzanstein_{service}_rpc_seconds",
            "Duration of gRPC calls; a stream's until it ends.",
            ["method", "code"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._running = LabelledGauge(
            f"ryzanstein_{service}_rpcs_running", "Running gRPC calls.", ["method"], registry=registry
        )

    def handshakes(self, port: str) -> HandshakeCounts:
        """Returns what counts the TLS handshakes of a port: `public`, or `services`. The metrics exist where one has TLS."""
        if self._handshakes is None:
            self._handshakes = (
                self._tls_counter("handshakes", "TLS handshakes of gRPC, by outcome.", "outcome"),
                self._tls_counter("handshake_failures", "Failed TLS handshakes of gRPC, by reason.", "reason"),
            )
        return HandshakeCounts(*self._handshakes, port)

    def _tls_counter(self, name: str, text: str, label: str) -> LabelledCounter:
        return LabelledCounter(f"{self._prefix}_{name}_total", text, ["port", label], registry=self._registry)

    def begun(self, path: str) -> None:
        """Counts a call of a method, as `/package.Service/Method`."""
        self._running.labels(_short(path)).inc()

    def ended(self, path: str, code: str, duration_s: float) -> None:
        """Counts the end of a call that has begun."""
        self._running.labels(_short(path)).dec()
        self._seconds.labels(_short(path), code).observe(duration_s)


def _short(path: str) -> str:
    service, _, method = path.rpartition("/")
    return f"{service.rpartition('.')[2]}/{method}"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that wraps every handler.

    It lets the call in or refuses it before its message is read, reads requests, binds the request id,
    maps exceptions to statuses, and measures and logs each call once at its end, except calls of probes
    and tools. Polls that succeed are logged at level debug.
    """

    def __init__(self, reading: RequestReading, guard: Guard | None = None, metrics: RpcMetrics | None = None) -> None:
        self._reading, self._guard, self._metrics = reading, guard, metrics
        self._wrapped: dict[str, tuple[Any, Callable[[_Call], Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        metadata: Any = handler_call_details.invocation_metadata or ()
        call = _Call(method, valid_request_id(str(dict(metadata).get(REQUEST_ID, ""))), self._metrics)
        if self._guard is not None:
            try:
                call.who = self._guard.admit(method, metadata)
            except errors.RyzansteinError as error:
                call.begin()
                call.end(error.code.name, reason=error.reason)
                return refusing(error)
        known, wrap = self._wrapped.get(method, (None, None))
        if wrap is None or known is not handler:  # another one refuses the call
            wrap = self._wrap(method, handler)
            self._wrapped[method] = handler, wrap
        return wrap(call)

    def _wrap(self, method: str, handler: Any) -> Callable[[_Call], grpc.RpcMethodHandler[Any, Any]]:
        """Returns what makes the handler of one call of a method."""
        take = ReadableRequests if handler.request_streaming else readable
        if handler.response_streaming:
            wrap = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            behavior: Any = handler.stream_stream or handler.unary_stream
        else:
            wrap = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
            behavior = handler.stream_unary or handler.unary_unary
        # A coroutine may also stream with context.write, as the health service does.
        running = _generator if inspect.isasyncgenfunction(behavior) else _coroutine
        deserializer = self._reading.deserializer(method, handler.request_deserializer)
        return lambda call: wrap(running(behavior, take, call), deserializer, handler.response_serializer)


def _coroutine(behavior: Any, take: Callable[[Any], Any], call: _Call) -> Any:
    async def run(request: Any, context: Any) -> Any:
        call.begin()
        try:
            response = await behavior(take(request), context)
        except BaseException as error:
            try:
                await call.fail(error, context)
                raise
            except grpc.aio.AbortError as aborted:
                request = context = None
                _forget_frames(aborted)
                raise
        call.end("OK")
        return response

    return run


def _generator(behavior: Any, take: Callable[[Any], Any], call: _Call) -> Any:
    async def run(request: Any, context: Any) -> AsyncIterator[Any]:
        call.begin()
        try:
            async for response in behavior(take(request), context):
                yield response
        except BaseException as error:
            try:
                await call.fail(error, context)
                raise
            except grpc.aio.AbortError as aborted:
                request = context = None
                _forget_frames(aborted)
                raise
        call.end("OK")

    return run


class _Call:
    """One call: it begins, and ends or fails once. It is measured and logged."""

    def __init__(self, method: str, request_id: str, metrics: RpcMetrics | None) -> None:
        self.request_id = request_id
        self.who: Caller | None = None
        self._method, self._quiet = method, method.startswith(_QUIET)
        self._metrics = None if self._quiet else metrics
        self._began_s = 0.0

    def begin(self) -> None:
        """Begins the call. The request's id is bound to the current task, which must serve this call alone."""
        bind_contextvars(request_id=self.request_id)
        self._began_s = time.monotonic()
        if self._metrics is not None:
            self._metrics.begun(self._method)
        if self.who is not None:
            let_in(self.who)

    def end(self, code: str, **more: object) -> None:
        duration_s = self._measure(code)
        if not self._quiet:
            say = log.debug if code == "OK" and self._method.endswith(_POLLED) else log.info
            say("call", method=self._method, code=code, duration_s=round(duration_s, 6), **more)

    def _measure(self, code: str) -> float:
        duration_s = time.monotonic() - self._began_s
        if self._metrics is not None:
            self._metrics.ended(self._method, code, duration_s)
        return duration_s

    async def fail(self, error: BaseException, context: Any) -> None:
        """Aborts the call with the error's status. Returns only if the error must propagate as is."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit | grpc.aio.AbortError):
            self.end("CANCELLED")
            return
        if isinstance(error, errors.RyzansteinError):
            self.end(error.code.name, reason=error.reason)
            await status.abort(context, error)
        elif isinstance(error, NotImplementedError):  # from generated code: the server lacks the method
            self.end("UNIMPLEMENTED")
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the method is not implemented")
        elif isinstance(error, Exception):
            self._measure("INTERNAL")
            log.exception("call failed", method=self._method)
            await status.abort(context, errors.internal(f"internal error, request {self.request_id}"))


def _forget_frames(aborted: grpc.aio.AbortError) -> None:
    """Breaks a cycle: gRPC's state of a call keeps the error, the error its frames, and these the call and its request.

    Otherwise refused requests would stay in memory until the next full collection.
    """
    aborted.__traceback__ = aborted.__context__ = aborted.__cause__ = None
