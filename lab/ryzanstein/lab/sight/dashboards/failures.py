"""Failures: what was lost, how soon it was detected, and what was done about it."""

from __future__ import annotations

from ryzanstein.lab.sight.dashboards.panels import Board, Panel, Query, Row, quantiles, rate_by


def _grown(metric: str, by: str, selected: str = "") -> tuple[Query, ...]:
    """Returns by how much a counter grew within five minutes."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return (Query(f"sum by ({by}) (increase({metric}{{{selected}}}[5m]))", legend),)


_LOST = Row(
    "What was lost",
    (
        Panel(
            "Failovers",
            "In five minutes, by cause.",
            "short",
            _grown("ryzanstein_router_failovers_total", "cause"),
            stacked=True,
        ),
        Panel(
            "Links lost",
            "In five minutes, by cause.",
            "short",
            _grown("ryzanstein_router_link_losses_total", "node_id, cause"),
            runbook="node-died",
        ),
        Panel(
            "Ranks lost",
            "In five minutes, by cause.",
            "short",
            _grown("ryzanstein_worker_rank_losses_total", "instance, cause"),
            runbook="rank-died",
        ),
        Panel(
            "Given up",
            "Generations that ran out of nodes or attempts, in five minutes.",
            "short",
            _grown("ryzanstein_router_failovers_exhausted_total", "cause"),
            runbook="no-nodes",
        ),
        Panel(
            "Recovery",
            "What nodes did, in five minutes.",
            "short",
            _grown("ryzanstein_worker_recoveries_total", "instance, rung"),
        ),
        Panel(
            "Members that left",
            "In five minutes, by cause.",
            "short",
            _grown("ryzanstein_orchestrator_departures_total", "cause"),
            runbook="orchestrator-unreachable",
        ),
    ),
)
_DETECTED = Row(
    "How soon",
    (
        Panel(
            "Detected to rerouted",
            "From the detection of a fault to the next attempt.",
            "s",
            quantiles("ryzanstein_router_detected_to_rerouted_seconds", ""),
        ),
        Panel("Hedges", "By outcome.", "short", _grown("ryzanstein_router_hedges_total", "outcome"), runbook="false-alarms"),
        Panel(
            "Suspicions",
            "In five minutes, by node and cause.",
            "short",
            _grown("ryzanstein_router_suspicions_total", "node_id, cause"),
            runbook="false-alarms",
        ),
        Panel(
            "Breakers",
            "0 closed, 1 half-open, 2 open.",
            "short",
            (Query("max by (node_id) (ryzanstein_router_breaker_state)", "{{node_id}}"),),
        ),
        Panel(
            "Time to accept",
            "From sending an attempt until the node accepts it.",
            "s",
            quantiles("ryzanstein_router_time_to_accept_seconds", "node_id"),
            runbook="far-node",
        ),
        Panel("Event loops", "Lag of the routers.", "s", quantiles("ryzanstein_router_loop_lag_seconds", "instance")),
    ),
)
_STORES = Row(
    "Sessions and journal",
    (
        Panel(
            "Outage of the session store",
            "1: it fails, turns are queued in memory.",
            "short",
            (Query("ryzanstein_router_store_outage", "{{instance}}"),),
            runbook="session-store-redis",
        ),
        Panel("Queued writes", "Of sessions.", "short", (Query("ryzanstein_router_store_backlog", "{{instance}}"),)),
        Panel(
            "Journal",
            "Tokens that are not yet written.",
            "short",
            (Query("ryzanstein_router_journal_lag_tokens", "{{instance}}"),),
        ),
        Panel(
            "Background tasks that ended",
            "Unexpectedly.",
            "short",
            tuple(
                rate_by(f"ryzanstein_{service}_background_task_ends_total", "instance, task")
                for service in ("router", "worker", "orchestrator")
            ),
        ),
    ),
)
FAILURES = Board("failures", "Ryzanstein: failures", (_LOST, _DETECTED, _STORES))
