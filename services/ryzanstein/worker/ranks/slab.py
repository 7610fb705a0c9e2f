"""A rank's view of the slab: the memory through which pages pass between its cache and the agent."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ryzanstein.worker.engine.plan import PageMove
from ryzanstein.worker.supervision.messages import PagesAnswer

if TYPE_CHECKING:
    from ryzanstein.worker.model.runner import ModelRunner


class RankSlab:
    """The slab of one rank. The agent gives it a size before the first move."""

    def __init__(self, fd: int, rank: int, runner: ModelRunner, tell: Callable[[PagesAnswer], None]) -> None:
        self._fd, self._rank, self._runner, self._tell = fd, rank, runner, tell
        self._memory: mmap.mmap | None = None

    def move(self, move: PageMove) -> None:
        """Copies this rank's heads of the pages."""
        if not (move.pages or move.hot):
            return
        if self._memory is None:
            self._memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        self._runner.move_pages(move, self._memory)

    def answer(self, number: int, places: list[int]) -> None:
        """Tells the agent that this rank has done its part."""
        self._tell(PagesAnswer(number, self._rank, places))
