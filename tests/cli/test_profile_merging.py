"""The traces of a node's ranks, laid over each other."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from ryzanstein.cli.profile.merging import merge


def slices(pid: int, arrivals: dict[int, float], left: float) -> list[dict[str, Any]]:
    """A rank's collectives: numbers and when it arrived; all last until `left` after number 1."""
    where = {"ph": "X", "cat": "collective", "name": "all_reduce", "pid": pid, "tid": 2}
    return [
        {**where, "ts": at, "dur": left + number - at, "args": {"number": number, "bytes": 8}}
        for number, at in arrivals.items()
    ]


def trace(pid: int, base_ns: int, *events: dict[str, Any]) -> bytes:
    named = {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "python"}}
    step = {"ph": "X", "cat": "step", "name": "step 4", "pid": pid, "tid": 1, "ts": 0.0, "dur": 9.0, "args": {}}
    document = {"ryzanstein": {"pid": pid}, "traceEvents": [named, step, *events], "baseTimeNanoseconds": base_ns}
    return json.dumps(document).encode()


def merged(traces: dict[int, bytes]) -> tuple[Any, list[dict[str, Any]]]:
    out = io.BytesIO()
    return merge(traces, out), json.loads(out.getvalue())["traceEvents"]


def test_an_arrow_leads_from_the_last_rank_to_each_that_waited() -> None:
    """Rank 1 counts from 3 us later: what it did at 1.0 was at 4.0 of rank 0's clock."""
    first = trace(77, 1_000, *slices(77, {10: 2.0, 11: 8.0}, 20.0))
    second = trace(78, 4_000, *slices(78, {10: 1.0, 11: 4.0}, 17.0))
    third = trace(77, 1_000, *slices(77, {10: 1.0, 11: 1.0}, 20.0))
    found, events = merged({0: first, 1: second, 2: third})
    assert (found.ranks, found.num_steps, found.num_collectives, found.num_arrows) == ([0, 1, 2], 1, 2, 4)
    stays = {
        (e["args"]["number"], e["pid"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") == "collective" and e["ph"] == "X"
    }
    assert stays[10, 1000][0] == 4.0
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begins) == len(ends) == 4
    assert {number: begin["pid"] for number, begin in begins.items() if begin["ts"] == 4.0} == dict.fromkeys([0, 2], 1000)
    assert [begin["pid"] for begin in begins.values() if begin["ts"] == 8.0] == [0, 0]
    for number, end in ends.items():
        arrived, left = next(stay for (_, pid), stay in stays.items() if pid == end["pid"] and stay[0] <= end["ts"] <= stay[1])
        assert arrived <= begins[number]["ts"] == end["ts"] <= left


def test_each_rank_is_a_process_of_its_own_and_so_are_its_devices() -> None:
    """Processes in containers may have equal ids, and all ranks have a device 0."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    span = {"ph": "X", "name": "span", "pid": "Spans", "tid": "x", "ts": 1.0, "dur": 2.0}
    flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 12, "tid": 12, "ts": 1.0}
    _, events = merged({rank: trace(12, 0, kernel, span, flow) for rank in (0, 1)})
    for name, at in (("gemm", 1), ("span", 2)):
        assert [e["pid"] for e in events if e["name"] == name] == [at, 1000 + at]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert len({e["id"] for e in events if e.get("cat") == "ac2g"}) == 2


def test_what_is_no_trace_is_refused_with_its_rank() -> None:
    for text in (b"", b"{}", b"[1]", b'{"ryzanstein": {"pid": 1}, "traceEvents": 7}'):
        with pytest.raises(ValueError, match="rank 1"):
            merged({0: trace(1, 0), 1: text})
