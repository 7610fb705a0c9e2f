"""Spans reach an OTLP collector with the client's trace; without an endpoint nothing is sent and the context passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from ryzanstein.observe.tracing import Tracing, traceparent

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Sink(collector_grpc.TraceServiceServicer):
    """A small OTLP collector: keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, str]] = []

    async def Export(
        self, request: collector.ExportTraceServiceRequest, context: object
    ) -> collector.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [(span.name, span.trace_id.hex(), span.parent_span_id.hex()) for span in scope.spans]
        return collector.ExportTraceServiceResponse()


@pytest.fixture
async def sink() -> AsyncIterator[tuple[Sink, str]]:
    sink, server = Sink(), grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield sink, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_spans_of_two_services_join_the_clients_trace(sink: tuple[Sink, str]) -> None:
    collected, endpoint = sink
    router, worker = Tracing("router", endpoint), Tracing("worker", endpoint, node_id="node-0")
    with router.span("chat", CLIENT, prompt_tokens=5) as span:
        handed_on = traceparent(span)
    with worker.span("generation", handed_on):
        pass
    await asyncio.gather(asyncio.to_thread(router.close), asyncio.to_thread(worker.close))
    spans = {name: (trace_id, parent) for name, trace_id, parent in collected.spans}
    assert spans["chat"] == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert spans["generation"] == ("0af7651916cd43dd8448eb211c80319c", handed_on.split("-")[2])


def test_without_an_endpoint_the_clients_context_is_handed_on_unchanged() -> None:
    tracing = Tracing("router")
    with tracing.span("chat", CLIENT) as span:
        assert traceparent(span, CLIENT) == CLIENT
    tracing.close()
