"""The console's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ryzanstein.observe.metrics import new_registry, show_service
from ryzanstein.process.background import Background
from ryzanstein.process.loop_lag import LoopLag

_LAYOUT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ConsoleTelemetry:
    """One instance for the process, built in `__main__` and passed on."""

    def __init__(self) -> None:
        self.registry: CollectorRegistry = new_registry()
        self.background, self.loop_lag = Background("console", self.registry), LoopLag("console", self.registry)
        show_service("console", self.registry)
        self.sockets = Gauge("ryzanstein_console_sockets", "Open tabs.", registry=self.registry)
        self.people = Gauge("ryzanstein_console_people", "People who are logged in.", registry=self.registry)
        self.answers_kept = Gauge("ryzanstein_console_answers_kept", "Answers in memory.", registry=self.registry)
        self.answers = self._counter("answers_total", "Answers that ended, by how.", "outcome")
        self.answers_forgotten = self._counter("answers_forgotten_total", "Answers forgotten for newer ones.")
        self.frames = self._counter("frames_total", "Frames of answers sent to tabs.")
        self.late_frames = self._counter(
            "late_frames_total", "Frames that a tab took so slowly that those behind them became one."
        )
        self.logins = self._counter("logins_total", "Logins, by outcome.", "outcome")
        self.refusals = self._counter("refusals_total", "Requests and tabs refused, by reason.", "reason")
        self.layout = Histogram(
            "ryzanstein_console_layout_seconds",
            "Time in which new text of an answer was parsed.",
            buckets=_LAYOUT_BUCKETS,
            registry=self.registry,
        )
        for outcome in ("complete", "length", "stopped", "failed", "lost"):  # so that `increase()` sees the first one
            self.answers.labels(outcome)
        for outcome in ("done", "refused"):
            self.logins.labels(outcome)
        for reason in ("host", "origin", "login", "sockets", "message"):
            self.refusals.labels(reason)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ryzanstein_console_{name}", text, labels, registry=self.registry)
