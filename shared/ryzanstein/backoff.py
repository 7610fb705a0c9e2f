"""How long to wait before what ended by itself is started again: longer each time, and little again after it was well."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s`, doubled with each end in a row up to `longest_s`, of which up to a half is taken off by chance so that many do
    not come back in one instant. What ran for `healthy_s` was well: its end is the first of a new row."""

    first_s: float = 0.1
    longest_s: float = 5.0
    healthy_s: float = 60.0


class Streak:
    """The ends in a row of one thing. There is no last try."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.ends = 0

    def ended(self, lived_s: float) -> float:
        """Seconds to wait, after a run of `lived_s`."""
        backoff = self._backoff
        self.ends = 1 if lived_s >= backoff.healthy_s else self.ends + 1
        longest_s = min(backoff.longest_s, backoff.first_s * 2.0 ** min(self.ends - 1, 32))
        return longest_s * random.uniform(0.5, 1.0)
