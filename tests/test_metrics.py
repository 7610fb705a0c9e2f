"""The metrics endpoint serves what the registry holds, in Prometheus' text format."""

from __future__ import annotations

import contextlib
import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.observe import metrics
from ryzanstein.observe.labelled import LabelledCounter, LabelledGauge, LabelledHistogram
from ryzanstein.observe.metrics import MetricsServer, new_registry


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
    assert [sample.name for sample in families["ryzanstein_router_requests"].samples] == ["ryzanstein_router_requests_total"]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    made = MetricsServer(new_registry(), "127.0.0.1", 0)
    yield made
    made.close()


def say(server: MetricsServer, data: bytes) -> bytes:
    """What is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        answer = b""
        with contextlib.suppress(OSError):  # it closes before it has read all of that
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65_536):
                answer += part
        return answer


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01" + bytes(range(256)), b"GET /metrics HTTP/1.1\r\nAccept: text/plain; version=x\r\n\r\n"]
)
def test_nonsense_leaves_no_traceback_and_the_endpoint_answers(
    server: MetricsServer, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    say(server, data)
    assert b"process_resident_memory_bytes" in say(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_goes_away_in_the_middle_leaves_no_traceback(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert say(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_is_silent_is_given_up(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._MetricsHandler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /met")
        assert connection.recv(1024) == b""


def test_a_renamed_metric_is_also_served_under_its_former_name() -> None:
    registry = new_registry()
    counter = Counter("ryzanstein_router_new", "Counted.", ["model"], registry=registry)
    registry.register(metrics.FormerName(counter, "ryzanstein_router_old"))
    counter.labels("m").inc(3)
    for name in ("new", "old"):
        assert registry.get_sample_value(f"ryzanstein_router_{name}_total", {"model": "m"}) == 3.0


def test_series_that_are_found_quickly_are_those_of_the_library() -> None:
    registry = CollectorRegistry()
    quick = LabelledCounter("quick", "Quick.", ["node", "cause"], registry=registry)
    plain = Counter("plain", "Plain.", ["node", "cause"], registry=registry)
    for metric in (quick, plain):
        for node in ("a", "b", "a"):
            metric.labels(node, "x").inc()
        metric.labels(node="a", cause="x").inc()
        metric.labels("b", 1).inc()
        metric.remove("b", "x")
        metric.labels("b", "x").inc(5)
    of = dict.fromkeys(("quick", "plain"), registry.get_sample_value)
    for node, cause, value in (("a", "x", 3.0), ("b", "x", 5.0), ("b", "1", 1.0)):
        assert [of[name](f"{name}_total", {"node": node, "cause": cause}) for name in of] == [value, value]
    quick.remove_by_labels({"cause": "x"})
    quick.labels("a", "x").inc()
    assert registry.get_sample_value("quick_total", {"node": "a", "cause": "x"}) == 1.0
    quick.clear()
    quick.labels("b", "1").inc(7)
    assert registry.get_sample_value("quick_total", {"node": "b", "cause": "1"}) == 7.0


def test_a_labelled_metric_counts_as_the_library_does() -> None:
    texts = []
    for histogram, counter, gauge in ((Histogram, Counter, Gauge), (LabelledHistogram, LabelledCounter, LabelledGauge)):
        registry = CollectorRegistry()
        times = histogram("times", "Times", ["model"], registry=registry, buckets=(0.1, 1.0, 5.0))
        for value in (0.05, 0.1, 0.5, 1.0, 4.0, 5.0, 6.0):
            times.labels("a").observe(value)
        times.labels("a").observe(0.2, {"trace_id": "abc"})
        events = counter("events", "Events", ["model"], registry=registry)
        events.labels("a").inc()
        events.labels("a").inc(2.5)
        with pytest.raises(ValueError, match="non-negative"):
            events.labels("a").inc(-1)
        level = gauge("level", "Level", ["model"], registry=registry)
        level.labels("a").inc(3)
        level.labels("a").dec()
        texts.append([line for line in generate_latest(registry).decode().splitlines() if "_created" not in line])
    assert texts[0] == texts[1]
    assert 'times_bucket{le="1.0",model="a"} 5.0' in texts[1]
