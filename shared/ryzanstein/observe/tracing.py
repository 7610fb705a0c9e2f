"""OpenTelemetry spans from face to node to step, if an OTLP endpoint or a folder for them is configured.

An endpoint `https://host:port` is reached with TLS; the variables of the OpenTelemetry specification
name the CA and the client's certificate. Trace context travels as a W3C `traceparent`: in gRPC
metadata and HTTP headers from clients, as a field of `Submit` to nodes. Spans never contain prompts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ryzanstein.observe.spans.count import SPANS

if TYPE_CHECKING:
    import grpc

_PROPAGATOR = TraceContextTextMapPropagator()
_EVERY_MS = 500
_CLOSE_S = 2.0


class Tracing:
    """A service's tracer. Without an endpoint and a folder its spans are no-ops that cost a microsecond.

    `ratio` of the traces that begin here are recorded; of others it is their beginning that says so. `name` is the service's
    own, of its file in `folder`. Raises OSError when a certificate that the environment names for the endpoint cannot be
    read, or the folder cannot be used.
    """

    def __init__(
        self,
        service: str,
        endpoint: str = "",
        *,
        folder: Path | None = None,
        ratio: float = 1.0,
        name: str = "",
        **attributes: str,
    ) -> None:
        self._provider: TracerProvider | None = None
        exporters: list[SpanExporter] = []
        # Imported here: they import the exporters' whole stacks, which are not needed without.
        if endpoint:
            exporters.append(_to_collector(endpoint))
        if folder is not None:
            from ryzanstein.observe.spans.files import SpanFile

            exporters.append(SpanFile(folder, name or service))
        if exporters:
            resource = Resource.create({"service.name": f"ryzanstein-{service}", **attributes})
            self._provider = TracerProvider(
                resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False
            )
            for exporter in exporters:
                counted = BatchSpanProcessor(_CountedExporter(exporter), schedule_delay_millis=_EVERY_MS)
                self._provider.add_span_processor(_CountedSpans())
                self._provider.add_span_processor(counted)
        self._tracer = (self._provider or trace.NoOpTracerProvider()).get_tracer("ryzanstein")

    @contextmanager
    def span(self, name: str, traceparent: str = "", **attributes: str | int | float) -> Iterator[Span]:
        """Opens a span around a block; its parent is the given context, or the current span."""
        context = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
        with self._tracer.start_as_current_span(name, context, attributes=attributes) as span:
            yield span

    def start(
        self,
        name: str,
        traceparent: str = "",
        attributes: Mapping[str, str | int | float] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        after: Sequence[Span] = (),
        began_ns: int | None = None,
    ) -> Span:
        """Returns a span that its caller ends, for work that outlives the block that began it.

        It is linked to those that it came `after`. `began_ns` is in Unix time; None: now.
        """
        if self._provider is None:
            return trace.INVALID_SPAN
        context = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
        links = [Link(each.get_span_context()) for each in after]
        return self._tracer.start_span(name, context, kind, attributes, links, began_ns)

    def close(self) -> None:
        """Sends the remaining spans, for two seconds at most: a collector that hangs does not hold up the end of a service."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
            closing.start()
            closing.join(_CLOSE_S)


class _CountedSpans(SpanProcessor):
    """Counts the recorded spans that have ended."""

    def on_end(self, span: ReadableSpan) -> None:
        SPANS.ended += 1


class _CountedExporter(SpanExporter):
    """Counts the spans that another exporter took, or did not."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            SPANS.exported += len(spans)
        else:
            SPANS.refused += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def traceparent(span: Span, received: str = "") -> str:
    """Returns the context to propagate: the span's, or `received` if the service does not trace."""
    if not span.get_span_context().is_valid:
        return received
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", received)


def recorded_trace(traceparent: str) -> str:
    """Returns the id of the trace of a context, in hexadecimal digits. Empty: it is not recorded."""
    _, _, rest = traceparent.partition("-")
    trace_id, _, rest = rest.partition("-")
    flags = rest.rpartition("-")[2]
    return trace_id if flags and int(flags, 16) & 1 else ""


def _to_collector(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    from ryzanstein.rpc.client import NO_PROXY

    credentials = _credentials() if endpoint.lower().startswith("https://") else None
    return OTLPSpanExporter(
        endpoint=endpoint,
        insecure=credentials is None,
        credentials=credentials,
        channel_options=(NO_PROXY,),  # type: ignore[arg-type]
    )


def _credentials() -> grpc.ChannelCredentials:
    """Returns what the environment says of TLS to the collector. Raises OSError if that cannot be used.

    The library would go on without a file that is missing, and ignores a client's certificate
    unless a CA is named too.
    """
    import grpc

    roots, key, chain = (_pem(name) for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"))
    if (key is None) != (chain is None):
        raise OSError("OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE must be set together")
    return grpc.ssl_channel_credentials(roots, key, chain)


def _pem(name: str) -> bytes | None:
    """Returns the content of the file that a variable names; that of traces counts before that of all signals."""
    for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        if path := os.environ.get(variable):
            try:
                content = Path(path).read_bytes()
            except OSError as error:
                raise OSError(f"{variable}: {path} cannot be read: {error.strerror}") from None
            if b"-----BEGIN " not in content:
                raise OSError(f"{variable}: {path} is not in PEM form")
            return content
    return None
