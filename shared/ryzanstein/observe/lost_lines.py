"""How many lines of a service's log were lost.

The counts are in memory that the service shares with the process that reads what its libraries write.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextvars import ContextVar
from enum import IntEnum

_WORD_BYTES = 8


class LineLoss(IntEnum):
    """Where and why a line is lost. Each has a word of the memory, with one writer."""

    UNWRITTEN = 0
    """The service could not write it, for example because the disk was full."""
    NATIVE_UNWRITTEN = 1
    """The same of a line of a library."""
    NATIVE_LIMITED = 2
    """Libraries wrote more lines in a second than are kept."""


class LostLines:
    """The counts of one service. `fd` is the memory that another process made; without it this one makes it."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("lost-lines") if fd is None else fd
        size = len(LineLoss) * _WORD_BYTES
        if fd is None:
            os.ftruncate(self.fd, size)
        self._words = memoryview(mmap.mmap(self.fd, size)).cast("Q")

    def counter(self, loss: LineLoss) -> Callable[[], None]:
        """Returns what counts one line."""

        def count() -> None:
            self._words[loss] += 1

        return count

    def by_cause(self) -> dict[str, int]:
        """Returns the lines that could not be written, and those over the limit of libraries."""
        unwritten = self._words[LineLoss.UNWRITTEN] + self._words[LineLoss.NATIVE_UNWRITTEN]
        return {"unwritten": unwritten, "limited": self._words[LineLoss.NATIVE_LIMITED]}


LOST_LINES: ContextVar[LostLines] = ContextVar("lost_lines")
"""Those of the service that runs here, once its log is set up."""
