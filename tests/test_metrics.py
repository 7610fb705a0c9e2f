"""The metrics endpoint serves what the registry holds, in Prometheus' text format."""

from __future__ import annotations

import urllib.request

from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.metrics import MetricsServer, new_registry


def test_the_endpoint_serves_service_and_process_metrics() -> None:
    registry = new_registry()
    Counter("ryzanstein_router_requests", "Requests.", ["code"], registry=registry).labels("OK").inc(3)
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as reply:
            families = {family.name: family for family in text_string_to_metric_families(reply.read().decode())}
    finally:
        server.close()
    sample = families["ryzanstein_router_requests"].samples[0]
    assert (sample.name, sample.labels, sample.value) == ("ryzanstein_router_requests_total", {"code": "OK"}, 3.0)
    assert "process_resident_memory_bytes" in families
