"""Records some steps between others, in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ryzanstein.worker.ranks.health import recorder as recorder_module
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes
from ryzanstein.worker.ranks.health.recorder import StepRecorder
from ryzanstein.worker.ranks.health.trace_rows import TraceRows
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile


class Rank:
    """Rank 1 of two, with what it has sent."""

    def __init__(self, board: RankBoard) -> None:
        self.sent: list[ProfileTrace] = []
        self.board = board
        self.recorder = StepRecorder(1, 2, board, self.sent.append)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            torch.ones(2, 2).mul(3)
            self.recorder.stepped()
            self.recorder.deliver()


def multiplications(trace: ProfileTrace) -> int:
    return sum(event.get("name") == "aten::mul" for event in json.loads(trace.trace)["traceEvents"])


@pytest.fixture
def rank() -> Iterator[Rank]:
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(2))
    rank = Rank(RankBoard(fd, 2, 1))
    yield rank
    rank.recorder.start(StartProfile((1,), 0))
    os.close(fd)


def test_so_many_steps_are_recorded_and_sent_once(rank: Rank) -> None:
    rank.step()
    rank.recorder.start(StartProfile((1,), 3, 7))
    rank.step(10)
    (trace,) = rank.sent
    assert (trace.rank, trace.number, trace.error, multiplications(trace)) == (1, 7, "", 3)


def test_a_request_for_another_rank_or_for_none_gives_up_what_runs(rank: Rank) -> None:
    for request in (StartProfile((0,), 5, 2), StartProfile((1,), 0, 1)):
        rank.recorder.start(StartProfile((0, 1), 2, 1))
        rank.step()
        rank.recorder.start(request)
        rank.step(5)
    assert rank.sent == []


def test_a_new_request_takes_the_place_of_one_that_runs(rank: Rank) -> None:
    rank.recorder.start(StartProfile((0, 1), 2, 1))
    rank.step()
    rank.recorder.start(StartProfile((1,), 4, 2))
    rank.step(9)
    assert [(trace.number, multiplications(trace)) for trace in rank.sent] == [(2, 4)]


def test_a_trace_that_cannot_be_written_says_so_and_costs_no_rank(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module.tempfile, "tempdir", "/nowhere")
    rank.recorder.start(StartProfile((1,), 1, 3))
    rank.step()
    (trace,) = rank.sent
    assert (trace.number, trace.trace) == (3, b"")
    assert "/nowhere" in trace.error


def test_a_trace_beyond_the_bound_is_empty(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_TRACE_BYTES", 10)
    rank.recorder.start(StartProfile((1,), 1, 3))
    rank.step()
    assert rank.sent == [ProfileTrace(1, b"", 3)]


def test_steps_and_collectives_are_rows_of_the_trace(rank: Rank) -> None:
    """More of them than the board keeps, and none of before."""
    rank.recorder.start(StartProfile((0, 1), 3, 7))
    for step in range(1, 4):
        rank.board.begin_step(step, 5)
        for _ in range(400):
            rank.board.begin("all_reduce", 64)
            rank.board.end()
        rank.board.end_step()
        rank.step()
    (sent,) = rank.sent
    trace = json.loads(sent.trace)
    assert trace["distributedInfo"] == {"backend": "ryzanstein", "rank": 1, "world_size": 2}
    events = trace["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    collectives = [event for event in events if event.get("cat") == "collective"]
    assert [(event["name"], event["args"]["tokens"]) for event in steps] == [("step 1", 5), ("step 2", 5), ("step 3", 5)]
    assert [event["args"]["number"] for event in collectives] == [*range(1, 1201)]
    assert {event["name"] for event in collectives} == {"all_reduce"}
    first, last = collectives[0]["ts"], collectives[-1]["ts"] + collectives[-1]["dur"]
    assert steps[0]["ts"] <= first < last <= steps[-1]["ts"] + steps[-1]["dur"] + 1
    computed = [event for event in events if event.get("name") == "aten::mul"]
    assert all(abs(event["ts"] - first) < 60e6 for event in computed), "one clock, to the minute at least"
    assert steps[0]["ts"] < computed[0]["ts"] < steps[1]["ts"] + 1000, "and to the millisecond"


def test_a_large_trace_is_sent_in_parts(tmp_path: Path) -> None:
    path, event = tmp_path / "trace", b'{"ph": "i", "name": "' + b"x" * 1000 + b'"}'
    path.write_bytes(b'{"schemaVersion": 1, "traceEvents": [' + b",".join([event] * 40_000) + b'], "baseTimeNanoseconds": 9}')
    with path.open("rb") as file:
        parts = list(TraceRows(0, 2).added_to(file, 2**30, 2**20))
    assert [more for _, more in parts] == [True] * (len(parts) - 1) + [False]
    assert max(len(part) for part, _ in parts) < 2**20 + 4096
    assert len(json.loads(b"".join(part for part, _ in parts))["traceEvents"]) == 40_004


@pytest.mark.parametrize("text", [b"", b"{}", b"x" * 9000])
def test_what_is_no_trace_is_not_sent(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "trace").write_bytes(text)
    with (tmp_path / "trace").open("rb") as file, pytest.raises(ValueError, match="no events"):
        list(TraceRows(0, 1).added_to(file, 2**20, 2**20))


FIRST = """
import os, sys, torch
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes
from ryzanstein.worker.supervision.messages import StartProfile
from ryzanstein.worker.ranks.health.recorder import StepRecorder

fd = os.memfd_create("test-board")
os.ftruncate(fd, board_bytes(1))
before = set(sys.modules)
recorder = StepRecorder(0, 1, RankBoard(fd, 1, 0), lambda trace: print(len(trace.trace) > 0))
recorder.start(StartProfile((0,), 1, 1))
torch.ones(2)
recorder.stepped()
recorder.deliver()
print(sorted(name for name in set(sys.modules) - before if name.startswith("torch.")))
"""


@pytest.mark.long
def test_the_first_recording_imports_nothing_that_takes_seconds(tmp_path: Path) -> None:
    """In a process of its own, as in a rank; here other tests may have imported it."""
    command = [sys.executable, "-c", FIRST]
    first = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert first.stdout == "True\n[]\n", first.stderr
