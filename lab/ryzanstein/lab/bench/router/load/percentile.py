"""Percentiles by nearest rank."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the percentile; NaN without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
