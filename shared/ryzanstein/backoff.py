"""Delays before something that ended unexpectedly is restarted.

They grow each time, and are short again after a healthy run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """A backoff: `first_s`, doubled with each consecutive end up to `longest_s`.

    Up to half of a delay is subtracted at random, so that many instances do not restart at the same
    instant. A run of `healthy_s` or more counts as healthy: its end is the first of a new streak.
    """

    first_s: float = 0.1
    longest_s: float = 5.0
    healthy_s: float = 60.0


class Streak:
    """The consecutive ends of one thing. The number of retries is not limited."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.ends = 0

    def ended(self, lived_s: float) -> float:
        """Returns the seconds to wait after a run of `lived_s`."""
        backoff = self._backoff
        self.ends = 1 if lived_s >= backoff.healthy_s else self.ends + 1
        longest_s = min(backoff.longest_s, backoff.first_s * 2.0 ** min(self.ends - 1, 32))
        return longest_s * random.uniform(0.5, 1.0)
