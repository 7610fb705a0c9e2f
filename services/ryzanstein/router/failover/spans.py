"""The spans of a generation's attempts: to which node, how they ended, and which one they came after."""

from __future__ import annotations

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from ryzanstein.observe.tracing import Tracing, traceparent

_KEPT = 8
"""Spans of ended attempts that a later one may be linked to."""


class AttemptSpans:
    """One span per attempt, each a child of the generation's. `parent` is the generation's trace context."""

    def __init__(self, tracing: Tracing, parent: str) -> None:
        self._tracing, self._parent = tracing, parent
        self._running: dict[int, Span] = {}
        self._ended: dict[int, Span] = {}

    def begin(self, attempt: int, node_id: str, why: tuple[str, int] | None = None, *, hedge: bool = False) -> str:
        """Returns the trace context for the node. `why`: the cause, and the attempt that was not enough."""
        about: dict[str, str | int] = {"ryzanstein.attempt": attempt, "ryzanstein.node_id": node_id, "ryzanstein.hedge": hedge}
        before = None
        if why is not None:
            about["ryzanstein.after"], number = why
            before = self._running.get(number) or self._ended.get(number)
        after = [] if before is None else [before]
        span = self._tracing.start("attempt", self._parent, about, kind=SpanKind.CLIENT, after=after)
        self._running[attempt] = span
        return traceparent(span, self._parent)

    def end(self, attempt: int, cause: str = "") -> None:
        """Ends the span of an attempt, if it has not ended: it was lost for this cause; empty: it was not."""
        if (span := self._running.pop(attempt, None)) is None:
            return
        if cause:
            span.set_attribute("ryzanstein.cause", cause)
            span.set_status(Status(StatusCode.ERROR, cause))
        span.end()
        self._ended[attempt] = span
        if len(self._ended) > _KEPT:
            del self._ended[min(self._ended)]

    def close(self) -> None:
        """Ends the spans of attempts that nobody needs any more."""
        for attempt in list(self._running):
            self.end(attempt)
