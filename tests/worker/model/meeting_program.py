"""One rank as a process of its own that draws who computes each collective, Python or C: `meeting_program.py RANK SIZE
SEGMENT_FD BOARD_FD LIBRARY OUT`. OUT gets what went wrong, an empty list if nothing did.
"""

import pickle
import random
import re
import sys
from pathlib import Path

import torch

from ryzanstein.worker.collectives import PeerGaveUp
from ryzanstein.worker.collectives.shm import ShmCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.ranks.health.board import RankBoard

SIZES = (1, 7, 2048, 16_383, 16_384, 16_387, 262_145, 600_001)  # around two arrivals, and around several chunks
ROUNDS, STEP_COLLECTIVES = 6, 7


class Rank:
    """A rank, and what went wrong."""

    def __init__(self, rank: int, size: int, fds: tuple[int, int], library: Path) -> None:
        self.rank, self.size, self.wrong = rank, size, []
        self._board = RankBoard(fds[1], size, rank)
        self._group = ShmCollectives(fds[0], rank, size, self._board, WaitPolicy(deadline_s=20.0))
        self._native, self._draw = NativeKernels(library).meeting, random.Random(rank)
        self._count = 0

    def _collectives(self) -> ShmCollectives:
        self._group.use(self._native if self._draw.random() < 0.5 else None)
        return self._group

    def sum(self, count: int) -> None:
        self._count += 1
        parts = [torch.randn(count, generator=torch.Generator().manual_seed(1000 * self._count + r)) for r in range(self.size)]
        expected = parts[0] + parts[1]
        for part in parts[2:]:
            expected += part
        found = self._collectives().all_reduce(parts[self.rank].clone())
        if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
            self.wrong.append(f"sum {self._count} of {count}")

    def others(self) -> None:
        """The collectives that only Python computes, between those of C."""
        gathered = self._collectives().all_gather(torch.tensor([float(self.rank)]))
        told = self._collectives().broadcast(torch.tensor([float(self.rank)]))
        whole = self._collectives().all_reduce(torch.tensor([1 << 40]))
        if (gathered.tolist(), told.tolist(), whole.tolist()) != (list(range(self.size)), [0.0], [self.size << 40]):
            self.wrong.append(f"after sum {self._count}: {gathered}, {told}, {whole}")

    def give_up(self, at: int, who: int) -> None:
        """One rank leaves a step before a collective; the others learn of it there, or from each other, and all rejoin.

        A rank may learn of it while it still looks around in the collective before, so the sum is part of the step.
        """
        try:
            self.sum(9)
            for number in range(STEP_COLLECTIVES):
                if (number, self.rank) == (at, who):
                    raise PeerGaveUp("all_reduce: this rank has")
                self._collectives().all_reduce(torch.ones(40_000 if number % 2 else 5))
        except PeerGaveUp as error:
            if self.rank != who and not re.fullmatch(r"all_reduce: rank \d has aborted the step", str(error)):
                self.wrong.append(str(error))
        else:
            self.wrong.append(f"rank {who} gave up at {at}: not noticed")
        self._group.rejoin()

    def run(self) -> None:
        for _ in range(ROUNDS):
            for count in SIZES:
                self.sum(count)
            self.others()
        for at in range(STEP_COLLECTIVES):
            for who in range(self.size):
                self.give_up(at, who)


def main() -> None:
    rank, size, segment_fd, board_fd = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    program = Rank(rank, size, (segment_fd, board_fd), Path(sys.argv[5]))
    program.run()
    Path(sys.argv[6]).write_bytes(pickle.dumps(program.wrong))


if __name__ == "__main__":
    main()
