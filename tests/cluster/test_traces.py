"""One trace from a client to the steps of each rank, through a node that dies, read from files by `ryzanstein trace`."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from websockets.sync.client import connect

from ryzanstein.cli.main import build
from ryzanstein.cli.processes.cluster import TRACES, ClusterSpec
from ryzanstein.cli.trace.reading import Trace, TracedSpan, read_traces
from ryzanstein.demo import MODEL_DIR

SECRET = "a question that belongs in no trace"


@pytest.fixture(scope="module")
def traced(new_harness: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    state = tmp_path_factory.mktemp("traced")
    yield from new_harness(ClusterSpec(MODEL_DIR, num_nodes=2, tp=2, state_dir=state, traces=True))


def trace_of(harness: Any, wanted: str, condition: Callable[[Trace], bool]) -> Trace:
    """The trace of an id, when all of it is there: spans are written every half second."""
    deadline = time.monotonic() + 20
    while True:
        found = [each for each in read_traces(harness.cluster.state_dir / TRACES) if each.is_of(wanted)]
        if found and condition(found[0]):
            return found[0]
        assert time.monotonic() < deadline, [span.name for each in found for _, span in each.tree()]
        time.sleep(0.1)


def below(trace: Trace, parent: TracedSpan) -> list[TracedSpan]:
    return [span for span in trace.spans if span.parent_id == parent.span_id]


def named(spans: list[TracedSpan], name: str) -> list[TracedSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.began_ns)


@pytest.mark.timeout(180)
def test_an_answer_that_moves_is_one_trace_down_to_the_ranks(traced: Any) -> None:
    killed: list[str] = []

    def on_delta(delta: Any) -> None:
        if not killed and delta.first_index > 20:
            killed.append(delta.node_id)
            traced.cluster.kill(delta.node_id)

    answer = traced.client.chat(f"Count from 1 to 60. {SECRET}", on_delta=on_delta, max_tokens=120, ignore_eos=True)
    traced.start_again(killed[0])
    assert len(set(answer.choices[0].nodes)) == 2
    trace = trace_of(traced, answer.generation_id, lambda each: len(named(each.spans, "node.generation")) > 0)
    (generation,) = named(trace.spans, "generation")
    (face,) = [span for span in trace.spans if span.span_id == generation.parent_id]
    assert (face.name, face.parent_id) == ("ryzanstein.v1.StreamChat", "")
    lost, moved = named(below(trace, generation), "attempt")
    assert lost.attributes["ryzanstein.node_id"] == killed[0]
    assert lost.error == lost.attributes["ryzanstein.cause"] == moved.attributes["ryzanstein.after"]
    assert moved.after == (lost.span_id,)
    assert not moved.error
    (node,) = below(trace, moved)
    assert (node.name, node.service) == ("node.generation", moved.attributes["ryzanstein.node_id"])
    prefill, decode = below(trace, node)
    assert (prefill.name, decode.name) == ("node.prefill", "node.decode")
    for phase in (prefill, decode):
        steps = below(trace, phase)
        assert steps
        for step in steps:
            ranks = sorted(below(trace, step), key=lambda span: span.name)
            assert [(step.name, rank.name) for rank in ranks] == [("step", "rank 0"), ("step", "rank 1")]
            for rank in ranks:
                spent = sum(rank.attributes[f"ryzanstein.{name}"] for name in ("compute_s", "collective_s", "tail_s"))
                assert spent == pytest.approx((rank.ended_ns - rank.began_ns) / 1e9, rel=0.01)
                assert step.began_ns <= rank.began_ns < rank.ended_ns <= step.ended_ns
                for wait in below(trace, rank):
                    assert rank.began_ns <= wait.began_ns <= wait.ended_ns <= rank.ended_ns + 1_000
    files = [path.read_text() for path in (traced.cluster.state_dir / TRACES).iterdir()]
    assert not any("belongs in no trace" in text for text in files)


@pytest.mark.timeout(120)
def test_the_command_shows_where_a_request_spent_its_time(traced: Any) -> None:
    traced.cluster.wait_nodes(2)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"Content-Type": "application/json", "X-Request-Id": "looked-at", "traceparent": parent}
    request = urllib.request.Request(f"{traced.cluster.http_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        answer = json.load(response)
    trace = trace_of(traced, answer["id"], lambda each: {"POST", "rank 1"} <= {span.name for span in each.spans})
    (face,) = named(trace.spans, "POST")
    assert (trace.trace_id, face.parent_id) == tuple(parent.split("-")[1:3])
    command = ["trace", "--state-dir", str(traced.cluster.state_dir)]
    latest = CliRunner().invoke(build(), command)
    assert latest.exit_code == 0
    assert "looked-at" in latest.output
    for wanted in ("looked-at", answer["id"], trace.trace_id):
        shown = CliRunner().invoke(build(), [*command, wanted])
        assert shown.exit_code == 0
        for text in ("POST", "generation (router-0)", "attempt 0", "node.prefill", "rank 1", "late_rank="):
            assert text in shown.output
    spans = json.loads(CliRunner().invoke(build(), [*command, "looked-at", "--json"]).stdout)[0]["spans"]
    assert {span["name"] for span in spans} >= {"POST", "generation", "attempt", "node.generation", "step", "rank 0"}


@pytest.mark.timeout(120)
def test_a_request_of_a_websocket_is_a_trace_of_its_own(traced: Any) -> None:
    """Those of one socket too, and one that is refused says why."""
    traced.cluster.wait_nodes(2)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with connect(traced.cluster.http_url.replace("http", "ws", 1) + "/v1/ws", subprotocols=["ryzanstein.v1"]) as socket:
        for name, model in (("one", "demo"), ("two", "demo"), ("none", "nothing")):
            asked = {"type": "submit", "id": name, "url": "/v1/chat/completions", "body": {**body, "model": model}}
            socket.send(json.dumps({**asked, "headers": {"X-Request-Id": f"socket-{name}"}}))
        ended: dict[str, dict[str, Any]] = {}
        while len(ended) < 3:
            frame = json.loads(socket.recv(timeout=30))
            if frame["type"] in ("done", "error"):
                ended[frame["id"]] = frame
    assert [ended[name]["type"] for name in ("one", "two", "none")] == ["done", "done", "error"]
    for name in ("one", "two"):
        wanted = ended[name]["generation"]
        trace = trace_of(traced, wanted, lambda each: {"SUBMIT", "rank 1"} <= {span.name for span in each.spans})
        (face,), (generation,) = named(trace.spans, "SUBMIT"), named(trace.spans, "generation")
        assert (face.parent_id, generation.parent_id, face.error) == ("", face.span_id, "")
    deadline = time.monotonic() + 20
    while True:
        spans = [span for trace in read_traces(traced.cluster.state_dir / TRACES) for span in trace.spans]
        if [span.error for span in spans if span.name == "SUBMIT" and span.error] == ["MODEL_NOT_FOUND"]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_request_that_was_not_traced_is_said_to_be_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(build(), ["trace", "nothing", "--state-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "no trace of 'nothing'" in done.output


def test_lines_that_are_no_spans_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / TRACES
    folder.mkdir()
    lines = ["", "{", "[]", "null", '{"resourceSpans": [{}]}', '{"resourceSpans": 3}', "[" * 100_000, "\x00\xff"]
    (folder / "a.jsonl").write_text("\n".join(lines))
    done = CliRunner().invoke(build(), ["trace", "--state-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "no traces in" in done.output
