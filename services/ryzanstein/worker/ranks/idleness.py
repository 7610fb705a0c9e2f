"""When idle ranks are asked whether they are there: a rank that hangs is found before a request pays for it. Plain logic.

One question at a time: the answers of ranks that are well would look like progress of the one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.ranks.board import RankProgress


class IdleChecks:
    """`number` of the last question, 0 before the first. `interval_s` 0: none is asked."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_at: float | None = None
        self.number = 0

    def answered(self, ranks: Sequence[RankProgress]) -> bool:
        """By all. Rank 0 says so in a message, and only then passes the question on."""
        return all(rank.answered >= self.number for rank in ranks[1:])

    def due(self, now: float, *, busy: bool) -> bool:
        """Whether to ask now, with the next number. `busy`: something runs or is owed."""
        if busy or self._busy_at is None:
            self._busy_at = now
        if not self._interval_s or now - self._busy_at < self._interval_s:
            return False
        self._busy_at = now
        self.number += 1
        return True
