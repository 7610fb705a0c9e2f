"""Ranks of one process that meet in C."""

import os
from collections.abc import Callable, Iterator

import pytest

from ryzanstein.worker.collectives import NoProgress
from ryzanstein.worker.collectives.segment import segment_bytes
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.native import NativeKernels

Groups = Callable[[int], list[ShmCollectives]]


@pytest.fixture
def groups(kernels: NativeKernels) -> Iterator[Groups]:
    """The collectives of so many ranks, which are threads of this process."""
    opened: list[int] = []

    def open_groups(size: int) -> list[ShmCollectives]:
        fd = os.memfd_create("segment")
        opened.append(fd)
        os.ftruncate(fd, segment_bytes(size))
        found = [ShmCollectives(fd, rank, size, NoProgress(), WaitPolicy(deadline_s=60.0)) for rank in range(size)]
        for group in found:
            group.use(kernels.meeting)
        return found

    yield open_groups
    for fd in opened:
        os.close(fd)
