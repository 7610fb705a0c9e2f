"""The metrics of the WebSocket face."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from ryzanstein.router.faces.openai.answers.failures import MALFORMED, TOO_LARGE
from ryzanstein.router.telemetry import RouterTelemetry

FACE = "websocket"


class SocketTelemetry:
    """Counts sockets, their ends, and what happens on them."""

    def __init__(self, telemetry: RouterTelemetry) -> None:
        registry = telemetry.registry
        self.background = telemetry.background
        self._ended = telemetry.request_ended
        self.open = Gauge("ryzanstein_router_websockets_open", "Open WebSockets", registry=registry)
        self.closed = Counter(
            "ryzanstein_router_websockets_closed_total", "WebSockets that closed, by close code", ["code"], registry=registry
        )
        self.malformed = Counter(
            "ryzanstein_router_websocket_malformed_total",
            "WebSocket messages that are no valid request, by reason",
            ["reason"],
            registry=registry,
        )
        self.unread = Counter(
            "ryzanstein_router_websocket_streams_unread_total",
            "Times a stream was not read any more because its client took nothing",
            registry=registry,
        )
        for reason in (MALFORMED, TOO_LARGE):
            self.malformed.labels(reason)

    def ended(self, method: str, code: int, duration_s: float = 0.0) -> None:
        """Counts a request that ended, at once by default. A path that does not exist is not a label."""
        known = method if method in ("/v1/chat/completions", "/v1/completions", "attach", "cancel") else "unknown"
        self._ended(FACE, known, str(code), duration_s)
