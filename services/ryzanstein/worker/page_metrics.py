"""The metrics of pages that move."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

DROPS = ("queue_full", "gone", "resting", "unimplemented", "unavailable", "draining", "refused", "failed", "unknown_node")
ADDRESSES = ("address", "not_member")
REFUSALS = ("foreign", "corrupt", "malformed", "not_ready", "no_room")
SOURCES = ("node", "host", "disk")
WAYS = ("tier", "computing")


class PageMetrics:
    """The metrics of one model's pages."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        self._sent = counter("pages_sent_total", "Pages of the KV cache sent to other nodes and to tiers.")
        self._sent_bytes = counter("page_bytes_sent_total", "Bytes of pages sent to other nodes and to tiers.")
        self._received = counter("pages_received_total", "Pages taken from other nodes.")
        self._received_bytes = counter("page_bytes_received_total", "Bytes of pages taken from other nodes.")
        self._dropped = counter("pages_dropped_total", "Pages that were to be sent and were not, by cause.", "cause")
        self._refused = counter("pages_refused_total", "Pages of others that were not taken, by cause.", "cause")
        self._addresses = counter(
            "page_addresses_refused_total", "Attempts to reach a node at an address that was not dialled, by cause.", "cause"
        )
        self._restored = counter("pages_restored_total", "Pages fetched instead of computed, by source.", "source")
        self._restore_failures = counter("page_restore_failures_total", "Fetches of pages that failed, by source.", "source")
        self._resumed = counter(
            "paused_choices_resumed_total", "Paused choices that came back from a tier, or are computed again.", "by"
        )
        self.queued = Gauge("ryzanstein_worker_pages_queued", "Pages that wait to be sent.", registry=registry)
        self.tier_bytes = Gauge(
            "ryzanstein_worker_page_tier_bytes", "Bytes of pages in memory and on disk.", ["tier"], registry=registry
        )
        for cause in DROPS:
            self._dropped.labels(cause)
        for cause in REFUSALS:
            self._refused.labels(cause)
        for cause in ADDRESSES:
            self._addresses.labels(cause)
        for way in WAYS:
            self._resumed.labels(way)
        for source in SOURCES:
            self._restored.labels(source)
            self._restore_failures.labels(source)

    def sent(self, num_bytes: int, num_pages: int) -> None:
        self._sent.inc(num_pages)
        self._sent_bytes.inc(num_bytes)

    def received(self, num_pages: int, num_bytes: int) -> None:
        self._received.inc(num_pages)
        self._received_bytes.inc(num_bytes)

    def drop(self, cause: str, num_pages: int = 1) -> None:
        self._dropped.labels(cause).inc(num_pages)

    def refuse(self, cause: str, num_pages: int = 1) -> None:
        self._refused.labels(cause).inc(num_pages)

    def refuse_address(self, cause: str) -> None:
        self._addresses.labels(cause).inc()

    def resumed(self, way: str) -> None:
        self._resumed.labels(way).inc()

    def restored(self, source: str, num_pages: int) -> None:
        self._restored.labels(source).inc(num_pages)

    def restore_failed(self, source: str) -> None:
        self._restore_failures.labels(source).inc()
