"""Spans reach an OTLP collector with the client's trace; without an endpoint nothing is sent and the context passes on."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from pydantic import ValidationError

from ryzanstein.observe.tracing import Tracing, traceparent
from ryzanstein.router.config import RouterSettings

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


class CollectorFiles:
    """A CA of the collector's side, and certificates that it issues, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, folder.name)])
        self._certificate = self._signed(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self.ca = self._written("ca.crt", self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """Returns the files of a certificate for localhost and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key, x509.SubjectAlternativeName([x509.DNSName("localhost")]))
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        public = certificate.public_bytes(serialization.Encoding.PEM)
        return self._written(f"{name}.crt", public), self._written(f"{name}.key", private)

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
        return builder.add_extension(extension, critical=False).sign(self._key, hashes.SHA256())

    def _written(self, name: str, content: bytes) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / name).write_bytes(content)
        return self.folder / name


@pytest.fixture
def files(tmp_path: Path) -> CollectorFiles:
    return CollectorFiles(tmp_path / "collector")


@pytest.fixture
async def tls_sink(files: CollectorFiles) -> AsyncIterator[tuple[Sink, str]]:
    """A collector that demands a certificate of its own CA."""
    sink, server = Sink(), grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(sink, server)
    certificate, key = files.issue("server")
    pairs = [(key.read_bytes(), certificate.read_bytes())]
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials(pairs, files.ca.read_bytes(), True))
    await server.start()
    yield sink, f"https://localhost:{port}"
    await server.stop(0)


def variables(monkeypatch: pytest.MonkeyPatch, signal: str = "", **paths: Path) -> None:
    for name, path in paths.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}{name}", str(path))


@pytest.mark.parametrize("signal", ["", "TRACES_"])
async def test_spans_reach_a_collector_with_tls_that_demands_a_certificate(
    tls_sink: tuple[Sink, str], files: CollectorFiles, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    collected, endpoint = tls_sink
    certificate, key = files.issue("client")
    variables(monkeypatch, signal, CERTIFICATE=files.ca, CLIENT_CERTIFICATE=certificate, CLIENT_KEY=key)
    tracing = Tracing("router", endpoint)
    with tracing.span("chat"):
        pass
    await asyncio.to_thread(tracing.close)
    assert [name for name, _, _ in collected.spans] == ["chat"]


@pytest.mark.parametrize("given", ["our certificate alone", "the CA alone", "another CA"])
async def test_no_span_goes_to_a_collector_that_is_not_the_one_or_does_not_know_us(
    tls_sink: tuple[Sink, str], files: CollectorFiles, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    collected, endpoint = tls_sink
    certificate, key = files.issue("client")
    other = CollectorFiles(files.folder.with_name("other"))
    if given != "our certificate alone":
        variables(monkeypatch, CERTIFICATE=other.ca if given == "another CA" else files.ca)
    if given != "the CA alone":
        variables(monkeypatch, CLIENT_CERTIFICATE=certificate, CLIENT_KEY=key)
    await _send(endpoint, monkeypatch)
    assert collected.spans == []


async def test_a_collector_without_tls_gets_nothing_in_its_place(
    sink: tuple[Sink, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, address = sink
    await _send(f"https://{address}", monkeypatch)
    assert collected.spans == []


async def _send(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends a span for a second at most."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracing = Tracing("router", endpoint)
    with tracing.span("chat"):
        pass
    await asyncio.to_thread(tracing.close)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"CERTIFICATE": "none.crt"}, "OTEL_EXPORTER_OTLP_CERTIFICATE: .*none.crt cannot be read: No such file"),
        ({"CERTIFICATE": "text.crt"}, "OTEL_EXPORTER_OTLP_CERTIFICATE: .*text.crt is not in PEM form"),
        ({"CLIENT_KEY": "client.key"}, "CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE must be set together"),
    ],
)
def test_what_the_environment_names_must_be_there(
    files: CollectorFiles, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    files.issue("client")
    (files.folder / "text.crt").write_text("no certificate")
    variables(monkeypatch, **{name: files.folder / file for name, file in given.items()})
    with pytest.raises(OSError, match=message):
        Tracing("router", "https://localhost:4317")
    Tracing("router", "localhost:4317").close()


def test_a_router_does_not_start_with_a_ca_that_is_missing(tmp_path: Path) -> None:
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "none.crt")}
    command = [sys.executable, "-P", "-m", "ryzanstein.router", "--grpc-port", "0", "--no-http", "--state-dir", str(tmp_path)]
    command += ["--otlp-endpoint", "https://localhost:4317"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("endpoint", ["htps://host:4317", "grpc://host:4317"])
def test_an_endpoint_with_another_scheme_would_be_reached_without_tls_and_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="https://host:port"):
        RouterSettings(otlp_endpoint=endpoint)
    assert RouterSettings(otlp_endpoint="https://[::1]:4317").otlp_endpoint == "https://[::1]:4317"


def test_a_collector_that_hangs_costs_spans_and_no_time() -> None:
    """In a process of its own, whose end it must not hold up either."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        code = (
            "from ryzanstein.observe.tracing import Tracing\n"
            f"tracing = Tracing('router', '127.0.0.1:{deaf.getsockname()[1]}')\n"
            "for _ in range(5000): tracing.start('span').end()\n"
            "tracing.close()\n"
        )
        began = time.monotonic()
        subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, timeout=60)
        assert time.monotonic() - began < 15, "30 s of the exporter's own"
