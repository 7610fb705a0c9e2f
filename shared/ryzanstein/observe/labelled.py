"""Metrics whose series are found in one dictionary lookup.

The library takes a lock and converts every label to text each time that a series is asked for. A request asks for some
twenty of them.
"""

from __future__ import annotations

from typing import Any, Self

from prometheus_client import Counter, Gauge, Histogram


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
    """A counter with labels."""


class LabelledGauge(_Found, Gauge):
    """A gauge with labels."""


class LabelledHistogram(_Found, Histogram):
    """A histogram with labels."""
