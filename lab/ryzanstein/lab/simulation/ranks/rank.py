"""One simulated rank: its process, its channel, its slot on the board, and whether it moves.

The code of the slot is real; its clock can be set back to when something happened.
"""

from __future__ import annotations

import time

from ryzanstein.lab.simulation.ranks.pipe import RankPipe
from ryzanstein.lab.simulation.ranks.process import SimulatedProcess
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.supervision.group import IDLE, PROFILE

COLLECTIVE = "all_reduce"


class SimulatedRank:
    """The state of one rank.

    `alive`: its end is not decided yet, whether or not it is visible. `hung`: it runs but never
    reaches its next collective. `busy`: its profiler starts or writes. `due`: it would be ready,
    but it does not move. `delayed`: it stood still recently.
    """

    def __init__(self, process: SimulatedProcess, pipe: RankPipe, board_fd: int, size: int) -> None:
        self.rank = process.rank
        self.process = process
        self.pipe = pipe
        self.alive = True
        self.hung = False
        self.busy = False
        self.due = False
        self.ready = False
        self.delayed = False
        self.profiled = False
        self.term_waits = False
        self.released = False
        self.in_step = False
        self.waits = False
        self.asked = 0
        self.at_ns: int | None = None
        self.board = RankBoard(board_fd, size, process.rank, self._clock_ns, process.pid)

    @property
    def moves(self) -> bool:
        return self.alive and not (self.process.stopped or self.hung or self.busy)

    def begin_step(self, step: int, num_tokens: int) -> None:
        self.in_step = True
        self.board.begin_step(step, num_tokens)

    def enter(self, at_ns: int) -> None:
        """Enters the collective, at the given time unless the rank stood still."""
        if not self.waits:
            self.waits = True
            self.at_ns = None if self.delayed else at_ns
            self.board.begin(COLLECTIVE)
            self.at_ns = None

    def leave(self) -> None:
        """Leaves the collective, which all ranks have reached."""
        self.waits = self.delayed = False
        self.board.end()

    def end_step(self) -> None:
        if self.in_step:
            self.in_step = False
            self.board.end_step()

    def profiles(self, busy: bool) -> None:
        """Marks the start or end of profiler work, between two steps."""
        self.busy = busy
        self.board.enter(PROFILE if busy else IDLE)

    def ask(self, number: int) -> None:
        """Checks whether the rank responds."""
        self.asked = number
        self.answer()

    def answer(self) -> None:
        """Answers the last check, if the rank moves and is in no step."""
        if self.asked and self.moves and not self.in_step:
            self.board.answer(self.asked)
            self.asked = 0

    def release(self) -> None:
        """Releases the memory of the board, once."""
        if not self.released:
            self.released = True
            self.board.close()

    def _clock_ns(self) -> int:
        return time.monotonic_ns() if self.at_ns is None else self.at_ns
