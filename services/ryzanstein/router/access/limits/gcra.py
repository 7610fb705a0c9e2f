"""Rates, by the generic cell rate algorithm (ITU-T I.371): one number per rate.

That number is when the bucket will be full again. It may be far ahead: what was used cannot be
refused any more, so it becomes a debt. It goes back when less was used than was expected. The scripts
of Redis compute the same, in the same order, with the same 64-bit floats.

Times are microseconds since the start of 2025, which a float has to a hundredth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ryzanstein import clock

EPOCH_S = 1_735_689_600
SECOND_US = 1e6
MAX_DEBT_US = 3600 * SECOND_US
"""The longest that a tenant waits for what it used beyond its rate."""


def now_us() -> float:
    return (clock.unix_s() - EPOCH_S) * SECOND_US


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket that holds `burst` units and gains one each `interval_us`."""

    interval_us: float
    burst: int

    def wait_us(self, full_at: float, now: float, cost: int) -> float:
        """Returns how long to wait until the cost is in the bucket; not positive: it is now.

        A cost above the whole bucket waits for a full one.
        """
        return max(now, full_at) + min(cost, self.burst) * self.interval_us - self.burst * self.interval_us - now

    def charged(self, full_at: float, now: float, cost: int) -> float:
        """Returns when the bucket is full again after a cost, or after a refund if that is negative."""
        return min(max(now, full_at) + cost * self.interval_us, now + self.burst * self.interval_us + MAX_DEBT_US)

    def remaining(self, full_in_us: float) -> int:
        """Returns the units in a bucket that is full in so long."""
        return max(0, min(self.burst, math.floor(self.burst - full_in_us / self.interval_us + 1e-6)))

    def share(self, of: int) -> Rate:
        """Returns the part that each of so many routers may give out alone."""
        return Rate(self.interval_us * of, max(1, round(self.burst / of)))
