"""One trace from the client through the router's face and generation to what the node is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from ryzanstein.v1 import inference_pb2 as inference

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Sink(collector_grpc.TraceServiceServicer):
    """A small OTLP collector: name to (trace, span, parent)."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, str, str]] = {}

    async def Export(self, request: Any, context: object) -> collector.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans[span.name] = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
        return collector.ExportTraceServiceResponse()


@pytest.fixture
async def sink() -> AsyncIterator[tuple[Sink, str]]:
    sink, server = Sink(), grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield sink, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_each_spans_parent_is_what_asked_for_it(
    sink: tuple[Sink, str], start_node: Any, start_router: Any, until: Any
) -> None:
    collected, endpoint = sink
    node = await start_node("a")
    client = await start_router(node, otlp_endpoint=endpoint)
    chat = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="hello")])
    await client.inference.Chat(chat, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))
    await until(lambda: len(collected.spans) == 3)
    face, generation, attempt = (collected.spans[name] for name in ("ryzanstein.v1.Chat", "generation", "attempt"))
    assert (face[0], face[2]) == (TRACE, PARENT)
    assert (generation[0], generation[2]) == (TRACE, face[1])
    assert (attempt[0], attempt[2]) == (TRACE, generation[1])
    assert node.submits[0].traceparent == f"00-{TRACE}-{attempt[1]}-01"


async def test_a_client_that_does_not_record_is_not_recorded(
    sink: tuple[Sink, str], start_node: Any, start_router: Any
) -> None:
    collected, endpoint = sink
    node = await start_node("a")
    client = await start_router(node, otlp_endpoint=endpoint)
    chat = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="hello")])
    await client.inference.Chat(chat, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-00"),))
    assert node.submits[0].traceparent.startswith(f"00-{TRACE}-")
    assert node.submits[0].traceparent.endswith("-00")
    await asyncio.sleep(1.0)  # spans leave every half second
    assert not collected.spans
