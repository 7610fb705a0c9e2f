"""The wiring of a simulated group: pipes in memory, and a board in real memory.

The descriptor of the board is held only for a moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextvars import Context
from types import TracebackType

from ryzanstein.lab.simulation.ranks.pipe import RankPipe
from ryzanstein.worker.ranks.health.board import board_bytes
from ryzanstein.worker.ranks.messages import RankSpec, StartRank


class SimulatedWiring:
    """A `source.GroupWiring`."""

    def __init__(self, spec: RankSpec, context: Context) -> None:
        self.board_fd = os.memfd_create("simulated-board")
        os.ftruncate(self.board_fd, board_bytes(spec.tp))
        now = time.monotonic()
        self.pipes = [RankPipe(StartRank(rank, spec, self.board_fd, -1, -1, -1, [], now), context) for rank in range(spec.tp)]
        self.closed = False

    @property
    def ranks(self) -> Sequence[RankPipe]:
        return self.pipes

    def take_slab(self) -> int:
        """Returns no descriptor: simulated ranks have no pages."""
        return -1

    def __enter__(self) -> SimulatedWiring:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the board's descriptor, also for an agent that never gets to it."""
        if not self.closed:
            self.closed = True
            os.close(self.board_fd)
