"""The board of a vLLM: written by other processes, read while they hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.worker.engines.board_rank import Rank
from tests.worker.engines.vllm_batches import BatchUpdate, sampler_class

from ryzanstein.worker.engines.vllm.board import MAX_RANKS, VARIABLE, BoardSlot, failures, read_board, standstill

__all__ = ["sampler_class"]


def test_the_rank_that_holds_the_others_up_is_named(tmp_path: Path) -> None:
    path = tmp_path / "board"
    assert read_board(path) == []
    assert standstill([], 0.0) == (0, "")
    ranks = [Rank(path, rank) for rank in range(3)]
    try:
        for rank in ranks:
            rank.does("begin", "end", "begin")
        ranks[0].does("end", "begin")
        ranks[2].does("end", "begin")
        assert [(each.rank, each.begun, each.ended) for each in read_board(path)] == [(0, 3, 2), (1, 2, 1), (2, 3, 2)]
        assert standstill(read_board(path), time.monotonic())[0] == 1, "it is a step behind"
        ranks[1].does("end", "begin")
        os.kill(ranks[2].process.pid, signal.SIGSTOP)
        while not read_board(path)[2].stopped:
            time.sleep(0.01)
        rank, text = standstill(read_board(path), time.monotonic())
        assert rank == 2
        assert text.startswith("rank 2 is stopped in step 3 and moved 0.")
        assert text.endswith("s ago, rank 0 is in step 3, rank 1 is in step 3")
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()
    assert not any(each.stopped for each in read_board(path)), "a dead process is not a stopped one"


def test_a_restart_with_fewer_ranks_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "board"
    for rank in range(4):
        BoardSlot(str(path), rank, 4).begin()
    BoardSlot(str(path), 0, 1)
    assert [(each.rank, each.begun) for each in read_board(path)] == [(0, 0)]


@pytest.mark.parametrize(("rank", "size"), [(MAX_RANKS, MAX_RANKS + 1), (2, 2), (-1, 1)])
def test_a_rank_beyond_the_board_is_refused(tmp_path: Path, rank: int, size: int) -> None:
    with pytest.raises(OSError, match="has no slot"):
        BoardSlot(str(tmp_path / "board"), rank, size)


def test_the_sampler_counts_the_steps_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler_class: type) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "board"))
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1, world_size=2))
    sampler = sampler_class(config, torch.device("cpu"), False)
    sampler.update_state(BatchUpdate(0))
    sampler.apply(torch.zeros(1, 9))
    sampler.update_state(None)
    ((rank, begun, ended),) = [(each.rank, each.begun, each.ended) for each in read_board(tmp_path / "board")]
    assert (rank, begun, ended) == (1, 2, 1)


def test_a_board_that_cannot_be_written_does_not_end_vllm(monkeypatch: pytest.MonkeyPatch, sampler_class: type) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/board")
    sampler = sampler_class(SimpleNamespace(), torch.device("cpu"), False)
    sampler.update_state(None)
    assert sampler.apply(torch.zeros(1, 9)).shape == (1, 9)


def test_failures_are_those_of_all_ranks_since_they_started(tmp_path: Path) -> None:
    path = tmp_path / "board"
    assert failures(path) == 0
    slots = [BoardSlot(str(path), rank, 3) for rank in range(3)]
    for rank in (0, 2, 2):
        slots[rank].fail()
    assert failures(path) == 3
    BoardSlot(str(path), 2, 3)
    assert failures(path) == 1
    path.write_bytes(b"")
    assert failures(path) == 0
    path.unlink()
    path.mkdir()
    assert failures(path) == 0
