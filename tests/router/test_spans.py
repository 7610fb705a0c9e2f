"""One trace from the client through the router's face and generation to what the node is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from opentelemetry.proto.trace.v1 import trace_pb2 as trace
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Sink(collector_grpc.TraceServiceServicer):
    """A small OTLP collector: name to (trace, span, parent), and all spans as they came."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, str, str]] = {}
        self.received: list[Any] = []

    async def Export(self, request: Any, context: object) -> collector.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.received.append(span)
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


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span; their values are of one type each."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_hedge_is_an_attempt_that_is_linked_to_the_one_that_was_silent(
    sink: tuple[Sink, str], start_node: Any, start_router: Any, until: Any
) -> None:
    collected, endpoint = sink
    slow = await start_node("slow", step_s=0.01)
    backup = await start_node("backup", state=worker.NODE_STATE_STARTING)
    tuning = {"suspicion": {"grace_s": 60.0, "stall_s": 60.0}}
    client = await start_router(slow, backup, ready_nodes=1, otlp_endpoint=endpoint, tuning=tuning)
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="hello")],
        sampling=inference.SamplingParams(max_tokens=60),
    )
    answer = asyncio.ensure_future(client.inference.Chat(chat))
    await until(lambda: slow.num_running == 1)
    backup.state = worker.NODE_STATE_READY
    await until(lambda: client.router.core.models()[0].ready_nodes == 2)
    slow.frozen = True
    assert (await answer).usage.completion_tokens == 60
    await until(lambda: sum(span.name == "attempt" for span in collected.received) == 2)
    first, hedge = sorted(
        (span for span in collected.received if span.name == "attempt"), key=lambda span: attributes(span)["ryzanstein.attempt"]
    )
    assert (attributes(first)["ryzanstein.hedge"], attributes(hedge)["ryzanstein.hedge"]) == (False, True)
    assert attributes(hedge)["ryzanstein.node_id"] == "backup"
    assert [link.span_id for link in hedge.links] == [first.span_id]
    assert first.parent_span_id == hedge.parent_span_id == bytes.fromhex(collected.spans["generation"][1])
    assert hedge.status.code != trace.Status.STATUS_CODE_ERROR


async def test_a_slow_first_token_leads_to_its_trace(sink: tuple[Sink, str], start_node: Any, start_router: Any) -> None:
    _, endpoint = sink
    client = await start_router(await start_node("a"), otlp_endpoint=endpoint)
    chat = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="hello")])
    await client.inference.Chat(chat, metadata=(("traceparent", f"00-{TRACE}-{PARENT}-01"),))
    other = f"00-{'1' * 32}-{PARENT}-00"
    await client.inference.Chat(chat, metadata=(("traceparent", other),))
    page = generate_latest(client.router.telemetry.registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name in ("time_to_first_token", "longest_pause"):
        samples = families[f"ryzanstein_router_{name}_seconds"].samples
        assert {each.exemplar.labels["trace_id"] for each in samples if each.exemplar} == {TRACE}
