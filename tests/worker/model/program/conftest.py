"""Ranks of one process that meet in C."""

import os
from collections.abc import Callable, Iterator

import pytest

from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.ranks.health.board import RankBoard, board_bytes

Groups = Callable[[int], list[ShmCollectives]]


@pytest.fixture
def groups(kernels: NativeKernels) -> Iterator[Groups]:
    """The collectives of so many ranks, which are threads of this process."""
    opened: list[int] = []

    def open_groups(size: int) -> list[ShmCollectives]:
        segment_fd, board_fd = os.memfd_create("segment"), os.memfd_create("board")
        opened.extend((segment_fd, board_fd))
        os.ftruncate(segment_fd, segment_bytes(size))
        os.ftruncate(board_fd, board_bytes(size))
        boards = [RankBoard(board_fd, size, rank) for rank in range(size)]
        patience = WaitPolicy(deadline_s=20.0)
        found = [ShmCollectives(segment_fd, rank, size, board, patience) for rank, board in enumerate(boards)]
        for group in found:
            group.use(kernels.meeting)
        return found

    yield open_groups
    for fd in opened:
        os.close(fd)
