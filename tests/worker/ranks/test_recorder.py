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
from ryzanstein.worker.supervision.messages import ProfileTrace, StartProfile


class Rank:
    """Rank 1 of two, with what it has sent."""

    def __init__(self, board: RankBoard) -> None:
        self.sent: list[ProfileTrace] = []
        self.recorder = StepRecorder(1, board, self.sent.append)

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
    rank.recorder.start(StartProfile(1, 0))
    os.close(fd)


def test_so_many_steps_are_recorded_and_sent_once(rank: Rank) -> None:
    rank.step()
    rank.recorder.start(StartProfile(1, 3, 7))
    rank.step(10)
    (trace,) = rank.sent
    assert (trace.rank, trace.number, trace.error, multiplications(trace)) == (1, 7, "", 3)


def test_a_request_for_another_rank_or_for_none_gives_up_what_runs(rank: Rank) -> None:
    for request in (StartProfile(0, 5, 2), StartProfile(1, 0, 1)):
        rank.recorder.start(StartProfile(1, 2, 1))
        rank.step()
        rank.recorder.start(request)
        rank.step(5)
    assert rank.sent == []


def test_a_new_request_takes_the_place_of_one_that_runs(rank: Rank) -> None:
    rank.recorder.start(StartProfile(1, 2, 1))
    rank.step()
    rank.recorder.start(StartProfile(1, 4, 2))
    rank.step(9)
    assert [(trace.number, multiplications(trace)) for trace in rank.sent] == [(2, 4)]


def test_a_trace_that_cannot_be_written_says_so_and_costs_no_rank(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module.tempfile, "tempdir", "/nowhere")
    rank.recorder.start(StartProfile(1, 1, 3))
    rank.step()
    (trace,) = rank.sent
    assert (trace.number, trace.trace) == (3, b"")
    assert "/nowhere" in trace.error


def test_a_trace_beyond_the_bound_is_empty(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_TRACE_BYTES", 10)
    rank.recorder.start(StartProfile(1, 1, 3))
    rank.step()
    assert rank.sent == [ProfileTrace(1, b"", 3)]


FIRST = """
import os, sys, torch
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes
from ryzanstein.worker.supervision.messages import StartProfile
from ryzanstein.worker.ranks.health.recorder import StepRecorder

fd = os.memfd_create("test-board")
os.ftruncate(fd, board_bytes(1))
before = set(sys.modules)
recorder = StepRecorder(0, RankBoard(fd, 1, 0), lambda trace: print(len(trace.trace) > 0))
recorder.start(StartProfile(0, 1, 1))
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
