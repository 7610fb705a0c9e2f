"""What an operator sees: metrics of each service, one trace from the client to the node, logs that carry the ids."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
SERVICES = {"ryzanstein-router", "ryzanstein-worker"}
PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "observe.md").read_text()


def samples(url: str) -> dict[str, float]:
    """Every sample of a /metrics page, summed over labels."""
    with urllib.request.urlopen(url, timeout=5) as reply:
        page = reply.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_the_router_counts_requests_tokens_and_first_token_times(calm: Any) -> None:
    url = calm.cluster.services["router-0"].metrics_url
    before = samples(url)
    answer = calm.client.chat("Count from 1 to 10.")
    after = samples(url)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("ryzanstein_router_tokens_total") == len(answer.token_ids)
    assert grown("ryzanstein_router_generations_total") == 1
    assert grown("ryzanstein_router_time_to_first_token_seconds_count") == 1
    assert grown("ryzanstein_router_time_per_output_token_seconds_count") == 1
    assert grown("ryzanstein_router_longest_pause_seconds_count") == 1
    assert grown("ryzanstein_router_stage_seconds_count") == 5
    assert grown("ryzanstein_router_request_seconds_count") == grown("ryzanstein_router_rpc_seconds_count") == 1
    assert after["ryzanstein_router_store_info"] == after["ryzanstein_router_build_info"] == 1
    assert after["ryzanstein_router_silent_seconds"] == 0


def test_a_node_counts_tokens_prefix_hits_and_steps_of_each_rank(calm: Any, holds: Any) -> None:
    answer = calm.client.chat("Count from 1 to 40.", session_id="counted")
    url = calm.cluster.services[answer.node_id].metrics_url
    seen = samples(url)
    assert seen["ryzanstein_worker_tokens_total"] >= answer.usage.completion_tokens
    assert seen["ryzanstein_worker_kv_blocks"] > 0
    calm.client.chat("Count from 1 to 40.", session_id="counted")
    assert holds(
        lambda: samples(url)["ryzanstein_worker_prefix_tokens_total"] > seen["ryzanstein_worker_prefix_tokens_total"], 5
    )
    with urllib.request.urlopen(url, timeout=5) as reply:
        page = reply.read().decode()
    assert 'ryzanstein_worker_step_seconds_count{model="demo",rank="0"}' in page
    assert 'ryzanstein_worker_step_seconds_count{model="demo",rank="1"}' in page


def test_the_orchestrator_counts_its_members(calm: Any) -> None:
    assert samples(calm.cluster.services["orchestrator"].metrics_url)["ryzanstein_orchestrator_nodes"] == 2


def test_every_metric_that_the_page_names_exists(calm: Any) -> None:
    pages = ""
    for service in calm.cluster.services.values():
        with urllib.request.urlopen(service.metrics_url, timeout=5) as reply:
            pages += reply.read().decode()
    import re

    found = re.findall(r"ryzanstein_(?:router|worker|orchestrator)_[a-z_]+", PAGE)
    named = {name.removesuffix("_bucket") for name in found}
    described = set(re.findall(r"^# TYPE (\S+)", pages, re.MULTILINE))
    assert named
    assert {name for name in named if name not in described and name.removesuffix("_total") not in described} == set()


def test_logs_carry_the_ids_of_a_request(calm: Any) -> None:
    request = calm.client.request("Hello!")
    reply = calm.client.inference.Chat(request, timeout=30, metadata=(("x-request-id", "find-me"),))
    lines = [line for name in ("router-0", reply.node_id) for line in calm.log_of(name)]
    mine = [line for line in lines if line.get("request_id") == "find-me"]
    assert {line["service"] for line in mine} == {"router", "worker"}
    on_node = [line for line in mine if line["service"] == "worker"]
    assert {line["node_id"] for line in on_node} == {reply.node_id}
    assert {line["generation_id"] for line in on_node} == {reply.generation_id}
    assert all(line["attempt"] == 0 for line in on_node)


class Sink(collector_grpc.TraceServiceServicer):
    """A small OTLP collector that keeps the spans of one trace."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []

    def Export(self, request: collector.ExportTraceServiceRequest, context: object) -> collector.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(service, span) for span in spans if span.trace_id.hex() == TRACE_ID]
        return collector.ExportTraceServiceResponse()


@pytest.fixture
def traced() -> Iterator[tuple[Sink, Any]]:
    """A node and a router that export to a sink."""
    sink, server = Sink(), grpc.server(ThreadPoolExecutor(2))
    collector_grpc.add_TraceServiceServicer_to_server(sink, server)
    flags = ("--otlp-endpoint", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, worker_flags=flags, router_flags=flags)) as cluster:
        yield sink, cluster
    server.stop(0)


@pytest.mark.long
def test_one_trace_goes_from_the_client_to_the_node(traced: tuple[Sink, Any], holds: Any) -> None:
    from ryzanstein.v1 import inference_pb2_grpc as inference_grpc

    sink, cluster = traced
    request = inference.ChatRequest(messages=[inference.Message(role=inference.ROLE_USER, content="Secret word.")])
    with grpc.insecure_channel(cluster.router_address) as channel:
        metadata = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN}-01"),)
        inference_grpc.InferenceServiceStub(channel).Chat(request, timeout=30, metadata=metadata)

    def by_id() -> dict[str, tuple[str, Any]]:
        return {span.span_id.hex(): (service, span) for service, span in list(sink.spans)}

    def all_here() -> bool:
        """Each service sends its spans when it likes: also the parents' have arrived."""
        spans = by_id()
        parents = {span.parent_span_id.hex() for _, span in spans.values()}
        return {service for service, _ in spans.values()} == SERVICES and parents <= {*spans, CLIENT_SPAN}

    assert holds(all_here, 20)
    spans = by_id()
    roots = [span for _, span in spans.values() if span.parent_span_id.hex() == CLIENT_SPAN]
    assert len(roots) == 1
    parents = {spans[span.parent_span_id.hex()][0] for service, span in spans.values() if service == "ryzanstein-worker"}
    assert "ryzanstein-router" in parents
    assert all("Secret" not in str(span) for _, span in spans.values())
