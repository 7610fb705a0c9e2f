"""All-reduces in C give the same sums, failures and reports as those in Python, also when ranks mix the two."""

import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ryzanstein.worker.kernels
from ryzanstein.worker.collectives import CollectiveTimeout, NoProgress, OutOfStep, PeerGaveUp
from ryzanstein.worker.collectives.meeting import PLACES
from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.ranks.health.board import Board, RankBoard, board_bytes

PROGRAM = Path(__file__).with_name("meeting_program.py")
DRIVER = Path(__file__).with_name("kernels") / "meeting_driver.c"
KERNELS = Path(ryzanstein.worker.kernels.__path__[0])
WITHIN_S = 100


def memory(size: int) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = memory(segment_bytes(3))
    yield fd
    os.close(fd)


@pytest.fixture
def board_fd() -> Iterator[int]:
    fd = memory(board_bytes(3))
    yield fd
    os.close(fd)


def in_c(kernels: NativeKernels, segment_fd: int, rank: int, size: int = 2, *, deadline_s: float = 5.0) -> ShmCollectives:
    group = ShmCollectives(segment_fd, rank, size, NoProgress(), WaitPolicy(deadline_s=deadline_s))
    group.use(kernels.meeting)
    return group


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_draw_who_computes_each_collective_agree_in_every_bit_and_give_up_together(
    size: int, built: Path, segment_fd: int, board_fd: int, tmp_path: Path
) -> None:
    fds = (segment_fd, board_fd)
    commands = [[sys.executable, PROGRAM, rank, size, *fds, built, tmp_path / str(rank)] for rank in range(size)]
    ranks = [subprocess.Popen([str(part) for part in command], pass_fds=fds) for command in commands]
    try:
        codes = [process.wait(timeout=WITHIN_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * size
    assert [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(size)] == [[]] * size
    board = Board(board_fd, size)
    assert len({rank.collective for rank in board.read()}) == 1, "all have counted the same"
    board.close()


def test_a_missing_peer_is_named_after_the_deadline(kernels: NativeKernels, segment_fd: int) -> None:
    with pytest.raises(CollectiveTimeout, match=r"^all_reduce: rank 1 waits for 0: timed out after 0\.\d s$"):
        in_c(kernels, segment_fd, 1, deadline_s=0.12).all_reduce(torch.zeros(3))  # longer than one call waits


def test_a_rank_that_is_in_another_operation_is_named_with_the_bytes_of_the_chunk(
    kernels: NativeKernels, segment_fd: int
) -> None:
    def reduce(rank: int) -> str:
        with pytest.raises(OutOfStep) as raised:
            in_c(kernels, segment_fd, rank).all_reduce(torch.ones(8 + rank))
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(reduce, range(2)))
    text = "all_reduce of {} bytes: rank {} is in a different operation than rank {}"
    assert told == [text.format(32, 1, 0), text.format(36, 0, 1)]


def test_a_peer_that_gives_up_while_c_waits_ends_the_wait(kernels: NativeKernels, segment_fd: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = in_c(kernels, segment_fd, 0), in_c(kernels, segment_fd, 1)
        waiting = pool.submit(first.all_reduce, torch.ones(8))
        time.sleep(0.1)
        rejoining = pool.submit(second.rejoin)
        with pytest.raises(PeerGaveUp, match=r"^all_reduce: rank 1 has aborted the step$"):
            waiting.result(timeout=5)
        first.rejoin()
        rejoining.result(timeout=5)
        sums = [pool.submit(group.all_reduce, torch.ones(2)) for group in (first, second)]
        assert [each.result(timeout=5).tolist() for each in sums] == [[2.0, 2.0]] * 2


def test_a_handler_of_a_signal_runs_while_c_waits(kernels: NativeKernels, segment_fd: int) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    began = time.monotonic()
    try:
        with pytest.raises(Interrupted):
            in_c(kernels, segment_fd, 0, deadline_s=60.0).all_reduce(torch.zeros(3))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < 1.0


def test_waiting_gives_the_core_away(kernels: NativeKernels, segment_fd: int) -> None:
    before = os.times()
    with pytest.raises(CollectiveTimeout):
        in_c(kernels, segment_fd, 0, deadline_s=0.5).all_reduce(torch.zeros(3))
    after = os.times()
    assert (after.user - before.user) + (after.system - before.system) < 0.25


def test_the_board_shows_of_c_what_it_shows_of_python(kernels: NativeKernels, segment_fd: int, board_fd: int) -> None:
    boards, board = [RankBoard(board_fd, 2, rank) for rank in range(2)], Board(board_fd, 2)
    groups = [ShmCollectives(segment_fd, rank, 2, boards[rank], WaitPolicy(deadline_s=5.0)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for rank in boards:
            rank.begin_step(1, 1)
        for native in (None, kernels.meeting):
            groups[0].use(native)
            waiting = pool.submit(groups[0].all_reduce, torch.ones(600))
            time.sleep(0.05)
            assert board.read()[0].phase == "all_reduce"
            groups[1].all_reduce(torch.ones(600))
            waiting.result(timeout=5)
            assert board.read()[0].phase == "forward"
        for rank in boards:
            rank.end_step()
    python, c = board.collectives(0, 1, 2)
    assert (python.number, c.number) == (1, 2)
    assert replace(python, number=0, arrived_ns=0, left_ns=0) == replace(c, number=0, arrived_ns=0, left_ns=0)
    assert 0.04 < (c.left_ns - c.arrived_ns) / 1e9 < 1
    assert board.last_collective() == 2
    (step,) = board.steps(0, 1, 1)
    assert step.collective_s == pytest.approx(sum(each.left_ns - each.arrived_ns for each in (python, c)) / 1e9)
    assert step.longest_s == pytest.approx(max(each.left_ns - each.arrived_ns for each in (python, c)) / 1e9)
    board.close()


def test_the_board_names_what_a_step_in_c_computes(board_fd: int) -> None:
    rank, board = RankBoard(board_fd, 3, 1), Board(board_fd, 3)
    source = (KERNELS / "meeting.h").read_text()
    codes = re.search(r"enum \{ (PLACE_NONE[^}]*) \}", source)
    at = re.search(r"BOARD_PLACE = (\d+)", source)
    assert codes
    assert at
    names = [code.strip().removeprefix("PLACE_").lower().replace("_", "-") for code in codes[1].split(",")]
    assert names == ["none", *PLACES[1:]]
    assert rank.address is not None
    word = ctypes.c_uint64.from_address(rank.address + 8 * int(at[1]))
    rank.begin_step(1, 1)
    shown = []
    for value in ((7 + 1) << 8 | names.index("down"), names.index("head"), 0):
        word.value = value
        shown.append((board.read()[1].place, board.read()[1].doing))
    assert shown == [("layer 7, down", "forward, layer 7, down"), ("head", "forward, head"), ("", "forward")]
    word.value = 1
    rank.end_step()
    assert board.read()[1].place == ""
    board.close()


@pytest.mark.parametrize(("sanitizer", "num_threads"), [("address,undefined", 3), ("thread", 1)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_sanitizer_finds_a_fault(sanitizer: str, num_threads: int, num_ranks: int, tmp_path: Path) -> None:
    """GCC's OpenMP library is not known to the thread sanitizer, so ranks have one thread there."""
    openmp = ["-fopenmp"] if num_threads > 1 else ["-Wno-unknown-pragmas", "-lgomp"]
    flags = ["-std=c11", "-O1", "-g", "-ffp-contract=off", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [str(DRIVER), str(KERNELS / "meeting.c"), f"-I{KERNELS}", "-lpthread"]
    program = tmp_path / "driver"
    built = subprocess.run(["gcc", *flags, *sources, *openmp, "-o", str(program)], capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip(f"no sanitizer {sanitizer}")
    assert built.returncode == 0, built.stderr
    command, environment = [str(program), str(num_ranks), str(num_threads)], os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-4000:]
