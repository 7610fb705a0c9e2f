"""The lateness of a service's event loop, measured by the ticks of its `AwakeClock`.

That costs 20 wake-ups per second and no extra task. A callback that holds the loop for longer than
a tick (50 ms) is measured less the time that was left until the next tick.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram

# On time, late on a busy machine, paused.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class LoopLag:
    """The metrics of one process. `service` is part of their names. Pass `observe` to the clock."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self._lag = Histogram(
            f"ryzanstein_{service}_loop_lag_seconds",
            "Event loop lag of this process.",
            buckets=BUCKETS,
            registry=registry,
        )
        self._worst = Gauge(
            f"ryzanstein_{service}_loop_lag_worst_seconds", "Largest event loop lag since process start.", registry=registry
        )
        self._worst_s = 0.0

    def observe(self, late_s: float) -> None:
        self._lag.observe(late_s)
        if late_s > self._worst_s:
            self._worst_s = late_s
            self._worst.set(late_s)
