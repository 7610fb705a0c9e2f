"""Traces in files: what is written is OTLP JSON, bounded, and a disk that refuses costs spans alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from ryzanstein.observe import metrics as metrics_module
from ryzanstein.observe import tracing as tracing_module
from ryzanstein.observe.metrics import new_registry, show_service
from ryzanstein.observe.spans.count import SpanCount
from ryzanstein.observe.spans.files import SpanFile
from ryzanstein.observe.tracing import Tracing, traceparent

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_line_is_otlp_json_with_hexadecimal_ids(tmp_path: Path) -> None:
    tracing = Tracing("worker", folder=tmp_path / "traces", name="a/node", node_id="a/node")
    with tracing.span("first", CLIENT, tokens=3) as first:
        second = tracing.start("second", traceparent(first), {"share": 0.5}, after=[first], began_ns=1_000)
    second.end(2_000)
    tracing.close()
    lines = (tmp_path / "traces" / "a_node.jsonl").read_text().splitlines()
    resources = [resource for line in lines for resource in json.loads(line)["resourceSpans"]]
    spans = {span["name"]: span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]}
    assert spans["first"]["traceId"] == spans["second"]["traceId"] == CLIENT.split("-")[1]
    assert spans["first"]["parentSpanId"] == CLIENT.split("-")[2]
    assert spans["second"]["parentSpanId"] == spans["second"]["links"][0]["spanId"] == spans["first"]["spanId"]
    assert (spans["second"]["startTimeUnixNano"], spans["second"]["endTimeUnixNano"]) == ("1000", "2000")
    assert {"key": "node_id", "value": {"stringValue": "a/node"}} in resources[0]["resource"]["attributes"]


def test_two_files_bound_what_is_kept(tmp_path: Path) -> None:
    tracing = Tracing("router", folder=tmp_path, name="r")
    spans = []
    for number in range(400):
        span = tracing.start(f"span {number}")
        span.end()
        spans.append(span)
    tracing.close()
    (tmp_path / "r.jsonl").unlink()
    file = SpanFile(tmp_path, "r", most_bytes=4_000)
    for span in spans:
        file.export([span])  # type: ignore[list-item]
    file.shutdown()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"r.jsonl", "r.jsonl.1"}
    assert all(0 < size <= 4_000 for size in sizes.values())
    assert "span 399" in (tmp_path / "r.jsonl").read_text()


def test_a_full_disk_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing("router", folder=tmp_path, name="r")
    span = tracing.start("span")
    span.end()
    tracing.close()
    file = SpanFile(tmp_path, "full")
    file._file.close()
    with open("/dev/full", "ab", buffering=0) as full, caplog.at_level(logging.WARNING):
        file._file = full
        for _ in range(3):
            file.export([span])  # type: ignore[list-item]
    assert [record.message for record in caplog.records] == [
        f"spans cannot be written to {tmp_path / 'full.jsonl'}: [Errno 28] No space left on device"
    ]


def test_a_share_of_the_traces_is_recorded(tmp_path: Path) -> None:
    tracing = Tracing("router", folder=tmp_path, name="r", ratio=0.1)
    recorded = sum(tracing.start("span").is_recording() for _ in range(2_000))
    assert 120 < recorded < 290
    assert tracing.start("span", CLIENT).is_recording(), "its beginning decides"
    assert not tracing.start("span", CLIENT[:-1] + "0").is_recording()
    tracing.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Tracing("router", folder=tmp_path / "file" / "traces")


def test_a_scrape_shows_what_became_of_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are neither exported nor refused, the queue had no room."""
    count = SpanCount()
    for module in (tracing_module, metrics_module):
        monkeypatch.setattr(module, "SPANS", count)
    registry = new_registry()
    show_service("router", registry)
    assert registry.get_sample_value("ryzanstein_router_spans_total", {"event": "ended"}) is None
    tracing = Tracing("router", folder=tmp_path, name="r")
    for _ in range(5):
        tracing.start("span").end()
    tracing.close()
    full = Tracing("router", folder=tmp_path, name="full")
    monkeypatch.setattr(SpanFile, "export", lambda *_: SpanExportResult.FAILURE)
    full.start("span").end()
    full.close()
    for event, num in {"ended": 6, "exported": 5, "refused": 1}.items():
        assert registry.get_sample_value("ryzanstein_router_spans_total", {"event": event}) == num
