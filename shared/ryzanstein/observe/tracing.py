"""OpenTelemetry spans from face to node to step, if an OTLP endpoint is configured.

Trace context travels as a W3C `traceparent`: in gRPC metadata and HTTP headers from clients, as a
field of `Submit` to nodes. Spans never contain prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """A service's tracer. Without an endpoint its spans are no-ops that cost a microsecond."""

    def __init__(self, service: str, endpoint: str = "", **attributes: str) -> None:
        self._provider: TracerProvider | None = None
        if endpoint:
            # Imported here: it imports the exporter's whole stack, which is not needed without a
            # collector.
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            from ryzanstein.rpc.client import NO_PROXY

            resource = Resource.create({"service.name": f"ryzanstein-{service}", **attributes})
            self._provider = TracerProvider(resource=resource)
            exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, channel_options=(NO_PROXY,))  # type: ignore[arg-type]
            self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = (self._provider or trace.NoOpTracerProvider()).get_tracer("ryzanstein")

    @contextmanager
    def span(self, name: str, traceparent: str = "", **attributes: str | int | float) -> Iterator[Span]:
        """Opens a span around a block; its parent is the given context, or the current span."""
        context = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
        with self._tracer.start_as_current_span(name, context, attributes=attributes) as span:
            yield span

    def start(self, name: str, traceparent: str = "", **attributes: str | int | float) -> Span:
        """Returns a span that its caller ends, for work that outlives the block that began it."""
        context = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
        return self._tracer.start_span(name, context, attributes=attributes)

    def close(self) -> None:
        """Sends the remaining spans."""
        if self._provider is not None:
            self._provider.shutdown()


def traceparent(span: Span, received: str = "") -> str:
    """Returns the context to propagate: the span's, or `received` if the service does not trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", received)
