"""Resumes paused sequences: from pages in a tier, or by computing them again.

The tiers receive a conversation's pages as soon as they are full, so parking a sequence copies
nothing: its blocks become idle and may be evicted. When the sequence is next in the queue, the engine
asks the agent to restore the evicted pages. The agent decides by measured cost. The sequence waits at
most `RETURN_S` for the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from ryzanstein.worker.engine.memory.prefix import Match
from ryzanstein.worker.engine.sequence import Sequence

RETURN_S = 1.0  # that a sequence waits for the agent's answer
LEAST_TOKENS = 128  # fewer are computed at once


class Parking:
    """The paused sequences, `parked`, of which the agent is asked before they run again. `clock` returns monotonic seconds."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self._block_size, self._clock = block_size, clock
        self.parked: dict[Sequence, float | None] = {}  # until when it waits; None: nobody was asked yet
        self._returning: list[Sequence] = []

    def park(self, sequence: Sequence) -> None:
        """Takes a sequence that was paused."""
        if sequence.group.message.parks:
            self.parked[sequence] = None

    def awaits(self, sequence: Sequence, match: Match) -> bool:
        """Returns whether a sequence for which there is room waits for pages. Asks for them the first time."""
        if sequence not in self.parked:
            return False
        until_s = self.parked[sequence]
        if until_s is None:
            if sequence.num_reusable - match.num_pages * self._block_size < LEAST_TOKENS:
                return False
            self.parked[sequence] = self._clock() + RETURN_S
            self._returning.append(sequence)
            return True
        return self._clock() < until_s

    def returned(self, group: int, choice: int) -> None:
        """Lets a sequence run: what the agent had of it is there."""
        for sequence in list(self.parked):
            if (sequence.group.id, sequence.choice) == (group, choice):
                self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that runs or has ended."""
        self.parked.pop(sequence, None)

    def take_returning(self) -> list[tuple[int, int, list[bytes]]]:
        """Returns for which sequences the agent is asked, with the keys of their pages, since the last call."""
        returning, self._returning = self._returning, []
        return [
            (sequence.group.id, sequence.choice, sequence.keys[: sequence.num_reusable // self._block_size])
            for sequence in returning
            if sequence in self.parked
        ]
