"""Measures an all-reduce over two ranks in Python and in C, interleaved: microseconds from the last entry to the last exit.

.venv/bin/python lab/benchmarks/meetings.py [--bytes 8192] [--rounds 20] [--repeats 1000]

Each rank has a core of its own and reports to a board, as ranks of a node do.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from rich.console import Console
from rich.table import Table

from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes

RANKS = 2
PATHS = ("Python", "C")
Times = list[tuple[int, int]]


def shared(size: int) -> int:
    """Returns the descriptor of zeroed memory that forks share."""
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, size)
    return fd


def rank_main(rank: int, fds: tuple[int, int], arguments: argparse.Namespace, parent: Connection) -> None:
    """Sends the times of entry and exit of each call, by path."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
    torch.set_num_threads(1)
    board = RankBoard(fds[1], RANKS, rank)
    group = ShmCollectives(fds[0], rank, RANKS, board, WaitPolicy(deadline_s=30.0))
    x_N, aligned_1 = torch.zeros(arguments.bytes // 4), torch.zeros(1)
    native, times = NativeKernels(library()).meeting, {path: Times() for path in PATHS}
    for _ in range(arguments.rounds):
        for path in PATHS:
            group.use(native if path == "C" else None)
            times[path] += [timed(group, x_N, aligned_1) for _ in range(arguments.repeats)]
    parent.send(times)


def timed(group: ShmCollectives, x_N: torch.Tensor, aligned_1: torch.Tensor) -> tuple[int, int]:
    group.all_reduce(aligned_1)
    begun_ns = time.monotonic_ns()
    group.all_reduce(x_N)
    return begun_ns, time.monotonic_ns()


def percentiles(ranks: Sequence[Times]) -> list[float]:
    """Returns p50, p90 and p99 in microseconds."""
    spans = sorted((max(each[1] for each in run) - max(each[0] for each in run)) / 1e3 for run in zip(*ranks, strict=True))
    return [spans[math.ceil(len(spans) * share) - 1] for share in (0.5, 0.9, 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1000)
    arguments = parser.parse_args()
    library()
    fds, context = (shared(segment_bytes(RANKS)), shared(board_bytes(RANKS))), multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(RANKS)]
    ranks = [context.Process(target=rank_main, args=(r, fds, arguments, pipes[r][1])) for r in range(RANKS)]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    times = [ours.recv() for ours, _ in pipes]
    for rank in ranks:
        rank.join()
    table = Table("us", "p50", "p90", "p99", title=f"all-reduce of {arguments.bytes} bytes over {RANKS} ranks")
    for path in PATHS:
        table.add_row(path, *(f"{value:.2f}" for value in percentiles([each[path] for each in times])))
    Console().print(table)


if __name__ == "__main__":
    main()
