"""By which factor a figure changed between two runs, and within which bounds.

These are the statistics of `bench compare`. There are two independent sets of rounds, each value a
figure's time over its reference kernel's. The factor is Hodges and Lehmann's: the median of all
quotients of a later over an earlier round. The interval holds the quotients that a two-sided test
of Mann and Whitney would not reject. It is exact for any distribution of the rounds, without
normality or resampling, and always gives the same answer. A stalled round moves neither much. It
assumes that the change is a factor and that rounds are independent.

Sources: Mann and Whitney, Annals of Mathematical Statistics 18 (1947); Hodges and Lehmann, ibid. 34
(1963); Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 3rd edition (2014),
sections 4.1 to 4.3.
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
    """The factor of later over earlier: above 1 is slower.

    The true factor is within low..high with the requested confidence.
    """

    factor: float
    low: float
    high: float

    def verdict(self, min_effect: float) -> Verdict:
        """Returns the verdict on the change.

        `slower` and `faster`: outside the noise and by at least `min_effect` (0.05: 5 %). `same`: a
        change of this size is excluded. `unclear`: the noise would hide it.
        """
        least = 1 + min_effect
        if self.low > 1 and self.factor >= least:
            return "slower"
        if self.high < 1 and self.factor <= 1 / least:
            return "faster"
        return "same" if 1 / least < self.low and self.high < least else "unclear"


def compare_rounds(before: Sequence[float], after: Sequence[float], error: float) -> Change:
    """Compares two sets of rounds. All values must be positive.

    `error` is the chance that the interval misses the true factor. Raises ValueError if there are
    too few rounds for such an interval, see `enough_rounds`.
    """
    rank = _interval_rank(len(before), len(after), error)
    if rank == 0:
        raise ValueError(f"{len(before)} and {len(after)} rounds have no interval with error {error:g}")
    quotients = sorted(later / earlier for later in after for earlier in before)
    return Change(statistics.median(quotients), quotients[rank - 1], quotients[-rank])


def enough_rounds(error: float) -> int:
    """Returns the least number of rounds, the same in both runs, for which an interval exists."""
    rounds = 1
    while 2 / math.comb(2 * rounds, rounds) > error:
        rounds += 1
    return rounds


def _interval_rank(num_before: int, num_after: int, error: float) -> int:
    """Returns which of the sorted quotients bounds the interval; 0 if none does.

    It counts from either end.

    It is the largest k for which a Mann-Whitney statistic below k has a chance of at most half of
    `error`.
    """
    total = math.comb(num_before + num_after, num_after)
    return sum(2 * below <= error * total for below in accumulate(_arrangements(num_before, num_after)))


def _arrangements(n: int, m: int) -> list[int]:
    """Returns in how many orders of n and m values the Mann-Whitney statistic is 0, 1, ..., n * m.

    These are the coefficients of the Gaussian binomial, the product of (1 - q^(m+i)) / (1 - q^i)
    over i = 1..n.
    """
    ways = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return ways
