import os
import time

import pytest

from ryzanstein.worker.ranks.health.board import Board, RankBoard, board_bytes
from ryzanstein.worker.supervision.group import IDLE


@pytest.fixture
def boards():
    """The agent's view and three ranks' own slots."""
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(3))
    board = Board(fd, 3)
    yield board, [RankBoard(fd, 3, rank) for rank in range(3)]
    os.close(fd)


def test_a_rank_that_has_not_started_has_no_pid():
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(1))
    board = Board(fd, 1)
    os.close(fd)
    assert board.read()[0].pid == 0
    board.close()


def test_each_rank_writes_its_own_slot(boards):
    board, ranks = boards
    ranks[1].begin_step(7, 33)
    zero, one, two = board.read()
    assert (one.pid, one.step, one.num_tokens, one.phase, one.in_step) == (os.getpid(), 7, 33, "forward", True)
    assert (zero.step, two.step) == (0, 0)


def test_a_collective_is_counted_shown_and_left_again(boards):
    board, ranks = boards
    ranks[0].begin_step(1, 1)
    ranks[0].begin("all_reduce")
    assert (board.read()[0].collective, board.read()[0].phase) == (1, "all_reduce")
    ranks[0].end()
    assert (board.read()[0].collective, board.read()[0].phase) == (1, "forward")


def test_time_in_collectives_adds_up_over_them(boards):
    board, ranks = boards
    for _ in range(2):
        ranks[0].begin("all_reduce")
        time.sleep(0.01)
        ranks[0].end()
    assert board.read()[0].collectives_s >= 0.02
    assert board.read()[1].collectives_s == 0.0


def test_all_times_are_of_the_clock_that_the_rank_was_given():
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(1))
    board, rank = Board(fd, 1), RankBoard(fd, 1, 0, clock_ns=lambda: 7_000_000_000)
    os.close(fd)
    rank.answer(3)
    assert (board.read()[0].answered, board.read()[0].progress_s) == (3, 7.0)
    rank.close()
    board.close()


def test_a_step_leaves_its_duration_and_an_idle_rank(boards):
    board, ranks = boards
    ranks[2].begin_step(4, 1)
    time.sleep(0.01)
    ranks[2].end_step()
    progress = board.read()[2]
    assert (progress.phase, progress.in_step, progress.step) == (IDLE, False, 4)
    assert 0.01 <= progress.last_step_s < 1.0


def test_progress_is_on_the_clock_that_all_processes_share(boards):
    board, ranks = boards
    before = time.monotonic()
    ranks[0].begin("barrier")
    assert before - 0.001 <= board.read()[0].progress_s <= time.monotonic()
    assert board.read()[0].still_s < 1.0


def test_long_names_are_cut(boards):
    board, ranks = boards
    ranks[0].begin("a_collective_with_a_long_name")
    assert board.read()[0].phase == "a_collective_wit"


def test_all_time_of_a_rank_is_in_one_of_the_phases():
    now_s = 10.0
    fd = os.memfd_create("test-board")
    os.ftruncate(fd, board_bytes(2))
    board = Board(fd, 2)
    lead, other = (RankBoard(fd, 2, rank, clock_ns=lambda: int(now_s * 1e9)) for rank in range(2))
    os.close(fd)
    lead.waited()
    other.answer(1)
    for _ in range(2):
        now_s += 1  # without work
        lead.waited()
        now_s += 2  # schedules
        for rank in (lead, other):
            rank.begin_step(1, 1)
        now_s += 4
        for rank in (lead, other):
            rank.begin("all_reduce")
        now_s += 8
        for rank in (lead, other):
            rank.end()
        now_s += 16  # samples
        for rank in (lead, other):
            rank.end_step()
        now_s += 32  # updates and reports
        lead.reported()
    spent = {"compute": 8, "collective": 16, "tail": 32}
    assert board.read()[0].phases_s == {**spent, "schedule": 4, "update": 64, "idle": 2}
    assert board.read()[1].phases_s == {**spent, "schedule": 0, "update": 0, "idle": 38}, "idle until its last step began"
    other.answer(2)
    assert board.read()[1].phases_s["idle"] == 70
    for view in (lead, other, board):
        view.close()


def test_how_much_of_the_weights_is_read_is_shown_and_is_progress(boards):
    board, ranks = boards
    before = board.read()[0].progress_s
    ranks[0].load(3, 10)
    now = board.read()[0]
    assert (now.loaded_bytes, now.load_bytes) == (3, 10)
    assert now.progress_s > before
    assert board.read()[1].load_bytes == 0


def test_packing_is_what_a_rank_does_when_all_weights_are_read(boards):
    board, (rank, *_) = boards
    rank.enter("load")
    phases = []
    for do in (
        lambda: rank.load(3, 10),
        lambda: rank.pack(0, 3),
        lambda: rank.load(10, 10),
        lambda: rank.pack(3, 10),
        lambda: rank.pack(10, 10),
        lambda: rank.load(1, 20),  # the same model in another format
        lambda: rank.pack(10, 11),
    ):
        do()
        phases.append(board.read()[0].phase)
    assert phases == ["load", "load", "load", "pack", "pack", "load", "load"]
    assert (board.read()[0].packed_bytes, board.read()[0].pack_bytes) == (10, 11)
