"""Every query of the dashboards has data on a cluster that works, but for those that show what went wrong."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from ryzanstein.lab.sight.dashboards import DASHBOARDS
from ryzanstein.lab.sight.dashboards.panels import without_variables

SEEN_WITHIN_S = 45.0
# What has no series before something goes wrong, by the metric; and what the rules record, which are not loaded here.
EMPTY_IN_CALM = (
    'ryzanstein_router_requests_total{code!~"OK|2..|3.."}',
    "model:ryzanstein_bad",
    "_background_task_ends_total",
    "ryzanstein_orchestrator_departures_total",
    "ryzanstein_router_failovers_total",
    "ryzanstein_router_failovers_exhausted_total",
    "ryzanstein_router_hedges_total",
    "ryzanstein_router_detected_to_rerouted_seconds",
)


@pytest.mark.timeout(240)
def test_every_query_has_data(world: Any) -> None:
    queries = {
        f"{board.name}, {panel.title}": without_variables(query.expression, "20s")
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
        if not any(metric in query.expression for metric in EMPTY_IN_CALM)
    }
    with world.load(ends=True):
        deadline = time.monotonic() + SEEN_WITHIN_S
        while empty := {title for title, query in queries.items() if all(map(math.isnan, world.prometheus.ask(query)))}:
            assert time.monotonic() < deadline, empty
            time.sleep(1)
