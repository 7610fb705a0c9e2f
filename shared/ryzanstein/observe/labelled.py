"""Metrics whose series are found in one dictionary lookup, and count in one call under one lock.

The library takes a lock and converts every label to text each time that a series is asked for, and counts in three to
nine calls of Python. A request asks for some twenty series: that was 6 % of what it costs a router.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any, Self

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client import values as library_values
from prometheus_client.samples import Exemplar

# With PROMETHEUS_MULTIPROC_DIR the library keeps its values in files: then it counts itself.
_IN_MEMORY = library_values.ValueClass is library_values.MutexValue


class _Found:
    """Remembers the series that were asked for. Labels are texts and given in order."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._found: dict[tuple[object, ...], Self] = {}
        super().__init__(*args, **more)

    def labels(self, *values: object, **named: object) -> Self:
        if (found := self._found.get(values)) is not None:
            return found
        series: Self = super().labels(*values, **named)  # type: ignore[misc]
        if values:
            self._found[values] = series
        return series

    def remove(self, *values: Any) -> None:
        self._found.pop(values, None)
        super().remove(*values)  # type: ignore[misc]

    def remove_by_labels(self, labels: dict[str, str]) -> None:
        self._found.clear()
        super().remove_by_labels(labels)  # type: ignore[misc]

    def clear(self) -> None:
        self._found.clear()
        super().clear()  # type: ignore[misc]


class LabelledCounter(_Found, Counter):
    """A counter with labels. Every use names them."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount < 0 or exemplar or not _IN_MEMORY:
            super().inc(amount, exemplar)
            return
        value = self._value
        with value._lock:
            value._value += amount


class LabelledGauge(_Found, Gauge):
    """A gauge with labels. Every use names them."""

    def inc(self, amount: float = 1) -> None:
        if not _IN_MEMORY:
            super().inc(amount)
            return
        value = self._value
        with value._lock:
            value._value += amount

    def dec(self, amount: float = 1) -> None:
        self.inc(-amount)


class LabelledHistogram(_Found, Histogram):
    """A histogram with labels. Every use names them."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        if not _IN_MEMORY:
            super().observe(amount, exemplar)
            return
        total, bucket = self._sum, self._buckets[bisect_left(self._upper_bounds, amount)]
        with total._lock:
            total._value += amount
            bucket._value += 1
        if exemplar:
            bucket.set_exemplar(Exemplar(exemplar, amount, time.time()))
