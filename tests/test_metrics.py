"""The metrics endpoint serves what the registry holds, in Prometheus' text format."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.observe import metrics_handler
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


NONSENSE = [
    b"",
    b"\r\n\r\n",
    b"\x16\x03\x01" + bytes(range(256)),
    b"GET\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    b"GET /metrics HTTP/x\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: text/plain; version=x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=9.x; escaping=?\r\n\r\n",
    b"GET /metrics?name[]=\xff&" + b"a=1&" * 1000 + b" HTTP/1.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"DELETE /metrics HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
]


@pytest.mark.parametrize("data", NONSENSE, ids=[repr(data[:24]) for data in NONSENSE])
def test_nonsense_leaves_no_traceback_and_the_endpoint_answers(
    server: MetricsServer, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = say(server, data)
    assert not answer.partition(b" ")[2].startswith(b"5"), "the client is at fault"
    assert b"process_resident_memory_bytes" in say(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def test_a_client_that_goes_away_in_the_middle_leaves_no_traceback(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert say(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_half_sent_requests_take_bounded_threads_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_handler, "_MAX_SECONDS", 1.0)
    server = MetricsServer(new_registry(), "127.0.0.1", 0)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(100)]
    try:
        for connection in connections:
            connection.sendall(b"GET /met")
        time.sleep(0.5)
        assert threading.active_count() <= threads + 16
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1024) == b""
    finally:
        for connection in connections:
            connection.close()
    assert b"process_resident_memory_bytes" in say(server, b"GET /metrics HTTP/1.1\r\n\r\n")
    server.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
