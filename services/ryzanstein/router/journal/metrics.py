"""The metrics of the journal of generations."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

log = structlog.get_logger(__name__)

_FLUSH_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class JournalMetrics:
    """Built once with the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_router_{name}_total", text, labels, registry=registry)

        self.taken_over = counter("generations_taken_over", "Generations taken over from other routers", "cause")
        self.moved = counter("generations_moved", "Generations taken over by other routers")
        self.relayed = counter("generations_relayed", "Attach and cancel calls relayed to the generation's owner")
        self.outages = counter("journal_outages", "Outages of the journal's store")
        self.bytes = counter("journal_bytes", "Bytes appended to the journal")
        self.up = Gauge("ryzanstein_router_journal_up", "1: the journal is written and the lease is kept", registry=registry)
        self.lag = Gauge("ryzanstein_router_journal_lag_tokens", "Tokens not yet written to the journal", registry=registry)
        self.flush = Histogram(
            "ryzanstein_router_journal_flush_seconds", "Duration of store writes", registry=registry, buckets=_FLUSH_BUCKETS
        )
        self.unwritable = counter("journal_unwritable", "Generations that could not be encoded for the journal")
        self.up.set(1)


class JournalOutage:
    """Tracks whether the store answers and its users work; logs the start and the end once.

    Users are identified by the names of their tasks. A user that failed is broken until it has used
    the store again, whatever others do.
    """

    def __init__(self, metrics: JournalMetrics) -> None:
        self._metrics = metrics
        self._since: float | None = None
        self._over = asyncio.Event()
        self._broken: set[str] = set()
        self.number = 0
        """How many outages there have been, with one that lasts."""

    @property
    def lasts(self) -> bool:
        return self._since is not None or bool(self._broken)

    def broke(self, user: str) -> None:
        """Marks a user as broken: its task ended with an unknown error."""
        self._broken.add(user)
        self._metrics.up.set(0)

    def begin(self, error: Exception) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self.number += 1
            self._over.clear()
            self._metrics.outages.inc()
            self._metrics.up.set(0)
            log.warning("journal unavailable, generations continue in memory", error=str(error))

    def end(self, user: str) -> None:
        """Records that the store has answered this user."""
        if self._since is not None:
            log.info("journal works again", after_s=round(time.monotonic() - self._since, 3))
            self._since = None
            self._over.set()
        self.mended(user)

    def mended(self, user: str) -> None:
        """Records that the user's task has done all its work."""
        self._broken.discard(user)
        if self._since is None:
            self._metrics.up.set(not self._broken)

    async def over(self, timeout_s: float) -> None:
        """Returns when any user finds that the store answers again, or after `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
