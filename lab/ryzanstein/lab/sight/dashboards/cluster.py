"""The cluster: what users get, what they ask for, and what there is to answer them."""

from __future__ import annotations

from ryzanstein.lab.sight.dashboards.panels import Board, Panel, Query, Row, quantiles, rate_by

_USERS = Row(
    "What users get",
    (
        Panel(
            "Bad events, of an hour",
            "The part that misses its objective. The error budget is objectives.toml's.",
            "percentunit",
            (Query("model:ryzanstein_bad:ratio_rate1h", "{{slo}} {{model}}"),),
        ),
        Panel(
            "First token",
            "Time from submit to the first token.",
            "s",
            quantiles("ryzanstein_router_time_to_first_token_seconds", "", exemplars=True),
            runbook="overload",
        ),
        Panel(
            "Silent answers",
            "The longest time since a token, and the longest wait for the first one, of answers that run now.",
            "s",
            (
                Query("max(ryzanstein_router_silent_seconds)", "since the last token"),
                Query("max(ryzanstein_router_oldest_unanswered_seconds)", "without a token"),
            ),
        ),
    ),
)
_CALLS = Row(
    "What they ask for",
    (
        Panel(
            "Requests",
            "Calls that ended, of each face.",
            "reqps",
            (rate_by("ryzanstein_router_requests_total", "face"),),
            stacked=True,
        ),
        Panel(
            "Failed requests",
            "Calls that did not end well, by code.",
            "reqps",
            (rate_by("ryzanstein_router_requests_total", "face, code", 'code!~"OK|2..|3.."'),),
            stacked=True,
        ),
        Panel("Duration", "Of calls; a stream's until it ends.", "s", quantiles("ryzanstein_router_request_seconds", "face")),
        Panel(
            "Refused",
            "Requests that admission refused.",
            "reqps",
            (rate_by("ryzanstein_router_refused_total", "reason"),),
            stacked=True,
            runbook="overload",
        ),
        Panel(
            "Generations",
            "Running, and waiting for a node.",
            "short",
            (
                Query("sum(ryzanstein_router_generations_running)", "running"),
                Query("sum(ryzanstein_router_generations_waiting)", "waiting"),
            ),
        ),
        Panel("Tokens", "Generated.", "short", (rate_by("ryzanstein_router_tokens_total", "node_id"),), stacked=True),
    ),
)
_SERVICES = Row(
    "What there is",
    (
        Panel(
            "Nodes by state",
            "Of each model.",
            "short",
            (Query("sum by (state) (ryzanstein_worker_state)", "{{state}}"),),
            stacked=True,
            runbook="no-nodes",
        ),
        Panel("Services that answer", "The scrape.", "short", (Query("sum by (job) (up)", "{{job}}"),)),
        Panel(
            "Releases",
            "How many services run which.",
            "short",
            tuple(
                Query(f"count by (version) (ryzanstein_{service}_build_info)", f"{service} {{{{version}}}}")
                for service in ("router", "worker", "orchestrator")
            ),
        ),
    ),
)
CLUSTER = Board("cluster", "Ryzanstein: cluster", (_USERS, _CALLS, _SERVICES))
