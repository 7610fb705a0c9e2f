"""Whatever holds a service's loop is seen in its metric, at no cost to speak of."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry
from ryzanstein.process.awake import TICK_S, AwakeClock
from ryzanstein.process.loop_lag import LoopLag
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics


async def test_a_held_loop_is_seen_less_a_tick_at_most() -> None:
    registry = CollectorRegistry()
    clock = AwakeClock(LoopLag("router", registry).observe)
    await asyncio.sleep(4 * TICK_S)
    time.sleep(0.6)  # noqa: ASYNC251 - what must not happen, and is to be seen
    await asyncio.sleep(2 * TICK_S)
    clock.close()
    worst = registry.get_sample_value("ryzanstein_router_loop_lag_worst_seconds")
    assert worst is not None
    assert worst >= 0.6 - TICK_S
    above = registry.get_sample_value("ryzanstein_router_loop_lag_seconds_bucket", {"le": "0.5"})
    total = registry.get_sample_value("ryzanstein_router_loop_lag_seconds_count")
    assert total is not None
    assert above is not None
    assert total > above


async def test_an_idle_loop_is_woken_at_most_20_times_a_second() -> None:
    lags: list[float] = []
    clock = AwakeClock(lags.append)
    await asyncio.sleep(1.0)
    clock.close()
    assert 0 < len(lags) <= 21


@pytest.mark.parametrize(
    ("service", "telemetry"),
    [("router", RouterTelemetry), ("worker", NodeMetrics), ("orchestrator", OrchestratorTelemetry)],
)
def test_every_service_has_the_metric(
    service: str, telemetry: type[RouterTelemetry | NodeMetrics | OrchestratorTelemetry]
) -> None:
    made = telemetry()
    made.loop_lag.observe(12.0)
    assert made.registry.get_sample_value(f"ryzanstein_{service}_loop_lag_worst_seconds") == 12.0
    assert made.registry.get_sample_value(f"ryzanstein_{service}_loop_lag_seconds_bucket", {"le": "10.0"}) == 0.0
    assert made.registry.get_sample_value(f"ryzanstein_{service}_loop_lag_seconds_bucket", {"le": "30.0"}) == 1.0
