"""How the time of a campaign is shared among its clusters."""

from __future__ import annotations

import math
import time


class Timetable:
    """A campaign's time, shared by the number of runs. `seconds` None: it takes what it takes.

    A cluster's share is its part of what is left when it begins, so that what one cluster does not
    need is there for those after it.
    """

    def __init__(self, seconds: float | None) -> None:
        self._ends_at = math.inf if seconds is None else time.monotonic() + seconds
        self._share_ends_at = math.inf

    def begin(self, runs: int, all_runs: int) -> None:
        """Begins the share of a cluster with `runs` of the `all_runs` that are left."""
        now = time.monotonic()
        self._share_ends_at = now + max(0.0, self._ends_at - now) * runs / max(1, all_runs)

    @property
    def is_over(self) -> bool:
        """Returns whether the current share is spent."""
        return time.monotonic() >= self._share_ends_at
