"""How many spans this process recorded, and what became of them. See `tracing`."""

from __future__ import annotations


class SpanCount:
    """Spans, once for each exporter. Each number is written by one thread."""

    def __init__(self) -> None:
        self.ended = 0
        """Recorded spans that have ended. Those that are neither exported nor refused wait, or found the queue full."""
        self.exported = 0
        self.refused = 0


SPANS = SpanCount()
