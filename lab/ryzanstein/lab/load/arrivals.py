"""When requests come in an open loop: whatever happens to those before, at a constant rate, at random or as recorded.

Each time is in seconds after the start of the load, and never less than the one before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count


def constant(rate: float) -> Iterator[float]:
    """Yields times that are 1/`rate` seconds apart."""
    return (number / rate for number in count())


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Yields the times of a Poisson process with `rate` arrivals a second: gaps are exponential and independent."""
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at
