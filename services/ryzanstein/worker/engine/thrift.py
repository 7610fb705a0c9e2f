"""How large a step may be where memory is short: learned from steps that failed, unlearned while steps go well.

Additive increase would take a step for every token; this doubles, and seldom enough that trying costs next to nothing.
"""

from __future__ import annotations

_STEPS_UNTIL_MORE = 64


class Thrift:
    """Bounds the tokens of one execution. `budget` is the bound of a machine with memory enough."""

    def __init__(self, budget: int) -> None:
        self._budget = self._limit = budget
        self._good = 0
        self.num_shortages = 0

    def allows(self, num_tokens: int) -> bool:
        """A single token is always tried."""
        return num_tokens <= max(1, self._limit)

    def short(self, num_tokens: int) -> None:
        """There was no memory for so many."""
        self.num_shortages += 1
        self._good = 0
        self._limit = min(self._limit, max(1, num_tokens // 2))

    def went(self, num_tokens: int) -> None:
        """So many were computed. Only what comes near the bound says that it could be higher."""
        if self._limit == self._budget or 2 * num_tokens <= self._limit:
            return
        self._good += 1
        if self._good >= _STEPS_UNTIL_MORE:
            self._good = 0
            self._limit = min(self._budget, 2 * self._limit)
