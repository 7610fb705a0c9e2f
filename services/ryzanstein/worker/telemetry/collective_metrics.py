"""The metrics of a model's collectives, from a sample of what its ranks record."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from ryzanstein.worker.supervision.group import CollectiveTiming

COLLECTIVE_BUCKETS = tuple(4**power / 1e6 for power in range(12))
"""From a microsecond to four seconds: a rank that comes later than that has stalled."""


class CollectiveMetrics:
    """How late ranks come to their collectives, and how long these take when all are there.

    The labels of an operation and of a rank are bound when they are first seen: several collectives
    are observed at once, ten times a second. A rank that gets its core in turns is seldom last and then
    very late: that shows in the seconds, not in the number of times.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"ryzanstein_worker_{name}", text, ["op"], buckets=COLLECTIVE_BUCKETS, registry=registry)

        self._skew = histogram("collective_skew_seconds", "From a collective's first arrival to its last, sampled.")
        self._transfer = histogram("collective_transfer_seconds", "Duration of collectives from their last arrival, sampled.")

        def counter(name: str, text: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, ["rank"], registry=registry)

        self._last = counter("collective_last_total", "Sampled collectives to which a rank came last.")
        self._late = counter("collective_late_seconds_total", "Waits for the rank that came last, of sampled collectives.")
        self._by_op: dict[str, tuple[Histogram, Histogram]] = {}
        self._by_rank: dict[int, tuple[Counter, Counter]] = {}

    def ready(self, num_ranks: int) -> None:
        """Shows the ranks of a group, so that `increase()` sees the first time. A rank alone has no collectives."""
        if num_ranks > 1:
            for rank in range(num_ranks):
                self._of_rank(rank)

    def observe(self, timings: Sequence[CollectiveTiming]) -> None:
        for timing in timings:
            skew, transfer = self._of_op(timing.op)
            skew.observe(timing.skew_s)
            transfer.observe(timing.transfer_s)
            if timing.last is not None:
                last, late = self._of_rank(timing.last)
                last.inc()
                late.inc(timing.skew_s)

    def _of_op(self, op: str) -> tuple[Histogram, Histogram]:
        if op not in self._by_op:
            self._by_op[op] = self._skew.labels(op), self._transfer.labels(op)
        return self._by_op[op]

    def _of_rank(self, rank: int) -> tuple[Counter, Counter]:
        if rank not in self._by_rank:
            self._by_rank[rank] = self._last.labels(str(rank)), self._late.labels(str(rank))
        return self._by_rank[rank]
