"""How much such a program may take, and how many may wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein import errors


@dataclass(frozen=True, slots=True)
class ProgramBounds:
    """The bounds of one job (processor seconds, bytes of memory) and of all (how many wait)."""

    cpu_s: float
    memory_bytes: int
    max_waiting: int

    def admit(self, num_waiting: int) -> None:
        """Raises RESOURCE_EXHAUSTED if so many wait that one more may not."""
        if num_waiting >= self.max_waiting:
            raise errors.queue_full(num_waiting, self.max_waiting)
