"""By which factor did a figure change from one run to another, and within which bounds: the statistics of `bench compare`.

Two independent sets of rounds, each value a figure's time over its reference kernel's. The factor is Hodges and Lehmann's: the
median of all quotients of a later over an earlier round. The interval holds the quotients that a two-sided test of Mann and
Whitney would not reject: exact for any distribution of the rounds, no normality, no resampling, the same answer every time, and
a round that stalled moves neither much. It assumes that the change is a factor and that rounds are independent.

Sources: Mann and Whitney, Annals of Mathematical Statistics 18 (1947); Hodges and Lehmann, ibid. 34 (1963); Hollander, Wolfe
and Chicken, Nonparametric Statistical Methods, 3rd edition (2014), sections 4.1 to 4.3.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Verdict = Literal["slower", "faster", "same", "unclear"]


@dataclass(frozen=True, slots=True)
class Change:
    """Later over earlier: above 1 is slower. The true factor is within low..high with the confidence that was asked for."""

    factor: float
    low: float
    high: float

    def verdict(self, min_effect: float) -> Verdict:
        """`slower` and `faster`: outside the noise and by at least `min_effect` (0.05: 5 %). `same`: so much is excluded.
        `unclear`: the noise would hide it."""
        least = 1 + min_effect
        if self.low > 1 and self.factor >= least:
            return "slower"
        if self.high < 1 and self.factor <= 1 / least:
            return "faster"
        return "same" if 1 / least < self.low and self.high < least else "unclear"


def compare_rounds(before: Sequence[float], after: Sequence[float], error: float) -> Change:
    """All values positive. `error` is the chance that the interval misses the true factor. Raises ValueError when so few rounds
    have no such interval, see `enough_rounds`."""
    rank = _interval_rank(len(before), len(after), error)
    if rank == 0:
        raise ValueError(f"{len(before)} and {len(after)} rounds have no interval with error {error:g}")
    quotients = sorted(later / earlier for later in after for earlier in before)
    return Change(statistics.median(quotients), quotients[rank - 1], quotients[-rank])


def enough_rounds(error: float) -> int:
    """The least number of rounds, the same in both runs, with which an interval exists."""
    rounds = 1
    while 2 / math.comb(2 * rounds, rounds) > error:
        rounds += 1
    return rounds


def _interval_rank(num_before: int, num_after: int, error: float) -> int:
    """Which of the sorted quotients, counted from either end, bounds the interval; 0 if none does.

    The largest k for which a Mann-Whitney statistic below k has at most half of `error` as its chance.
    """
    total = math.comb(num_before + num_after, num_after)
    return sum(2 * below <= error * total for below in accumulate(_arrangements(num_before, num_after)))


def _arrangements(n: int, m: int) -> list[int]:
    """In how many orders of n and m values the Mann-Whitney statistic is 0, 1, ..., n * m: the coefficients of the Gaussian
    binomial, the product of (1 - q^(m+i)) / (1 - q^i) over i = 1..n."""
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return ways
