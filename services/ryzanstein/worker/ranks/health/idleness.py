"""Decides when to check idle ranks, so that a hung rank is found before a request pays for it.

Plain logic. One check at a time: the answers of healthy ranks to further checks would look like
progress of the hung one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.supervision.group import RankProgress


class IdleChecks:
    """The checks of idle ranks.

    `number` is that of the last check, 0 before the first. `interval_s` 0: no checks.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_at: float | None = None
        self.number = 0

    def answered(self, ranks: Sequence[RankProgress]) -> bool:
        """Returns whether all ranks above 0 have answered the last check.

        Rank 0 answers with a message to the agent, and passes the check on to the others.
        """
        return all(rank.answered >= self.number for rank in ranks[1:])

    def due(self, now: float, *, busy: bool) -> bool:
        """Returns whether to check now, with the next number. `busy`: something runs or is owed."""
        if busy or self._busy_at is None:
            self._busy_at = now
        if not self._interval_s or now - self._busy_at < self._interval_s:
            return False
        self._busy_at = now
        self.number += 1
        return True
