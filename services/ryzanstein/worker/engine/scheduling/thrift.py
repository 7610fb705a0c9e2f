"""Limits the size of a step when memory is short.

The limit is lowered by steps that failed and raised again while steps succeed. Additive increase
would need a step for every token. This doubles the limit, and seldom enough that trying costs next
to nothing.
"""

from __future__ import annotations

_STEPS_UNTIL_MORE = 64


class Thrift:
    """A limit on the tokens of one execution. `budget` is the limit with enough memory."""

    def __init__(self, budget: int) -> None:
        self._budget = self._limit = budget
        self._good = 0
        self.num_shortages = 0

    @property
    def limit(self) -> int:
        """How many tokens may be tried. A single one is always tried."""
        return max(1, self._limit)

    def allows(self, num_tokens: int) -> bool:
        """Returns whether an execution of so many tokens may be tried."""
        return num_tokens <= self.limit

    def short(self, num_tokens: int) -> None:
        """Records that memory ran out for so many tokens."""
        self.num_shortages += 1
        self._good = 0
        self._limit = min(self._limit, max(1, num_tokens // 2))

    def went(self, num_tokens: int) -> None:
        """Records that so many tokens were computed.

        Only a step near the limit shows that the limit could be higher.
        """
        if self._limit == self._budget or 2 * num_tokens <= self._limit:
            return
        self._good += 1
        if self._good >= _STEPS_UNTIL_MORE:
            self._good = 0
            self._limit = min(self._budget, 2 * self._limit)
