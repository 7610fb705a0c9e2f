"""How fast a value grows: the median of all slopes between two samples (Theil 1950; Sen 1968), and how sure that is.

Samples that follow each other are alike, so the interval is from a bootstrap of blocks of residuals (Kuensch 1989), not of
single ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS = 400
_MOST_POINTS = 240
_LEAST_POINTS = 12
_WINDOW_S = 300.0

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth in an hour, as a share of the median value; the bounds hold 95 % of the draws. `typical` is that median."""

    typical: float
    per_hour: float
    lower: float
    upper: float


def slope_of(at_s: Sequence[float], values: Sequence[float], seed: int = 0, *, lowest: bool = False) -> Slope | None:
    """Returns the slope; None: there are too few samples, or the value is 0 throughout.

    `lowest`: of a value that goes up and down with the load, which leaks if it no longer comes down. The lowest one of each
    five minutes counts, where there are enough of them.
    """
    times, found = np.asarray(at_s, dtype=np.float64) / 3600, np.asarray(values, dtype=np.float64)
    known = np.isfinite(found)
    times, found = times[known], found[known]
    if lowest:
        times, found = _lowest(times, found)
    if len(found) < _LEAST_POINTS or not np.any(found):
        return None
    times, found = _thinned(times), _thinned(found)
    typical = float(np.median(found)) or float(np.mean(np.abs(found)))
    slope = _theil_sen(times, found)
    fitted = slope * times
    residuals = found - fitted
    rng, length = np.random.default_rng(seed), max(2, round(len(found) ** (1 / 3) * 2))
    drawn = [_theil_sen(times, fitted + _blocks(residuals, length, rng)) for _ in range(_DRAWS)]
    lower, upper = np.percentile(drawn, [2.5, 97.5])
    return Slope(typical, slope / typical, float(lower) / typical, float(upper) / typical)


def _theil_sen(times: Values, values: Values) -> float:
    first, second = np.triu_indices(len(times), k=1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def _blocks(residuals: Values, length: int, rng: np.random.Generator) -> Values:
    starts = rng.integers(0, len(residuals) - length + 1, size=-(-len(residuals) // length))
    return np.concatenate([residuals[start : start + length] for start in starts])[: len(residuals)]


def _lowest(times: Values, values: Values) -> tuple[Values, Values]:
    windows = np.floor(times * 3600 / _WINDOW_S)
    starts = np.flatnonzero(np.diff(windows, prepend=-1.0))
    if len(starts) < _LEAST_POINTS:
        return times, values
    return times[starts], np.minimum.reduceat(values, starts)


def _thinned(values: Values) -> Values:
    """Returns the means of equal groups where there are more points than pairs can be counted of."""
    groups = min(len(values), _MOST_POINTS)
    return np.array([part.mean() for part in np.array_split(values, groups)])
