"""A node and its ranks: what a second of each is made of, what the steps compute, what the memory is used for."""

from __future__ import annotations

from ryzanstein.lab.sight.dashboards.panels import Board, Panel, Query, Row, quantiles, rate_by

_NODE = 'instance=~"$instance", model=~"$model"'
_RANKS = Row(
    "Ranks",
    (
        Panel(
            "What a second is made of",
            "Of each rank, by phase. Who computes while the others wait in collectives is slow.",
            "s",
            (rate_by("ryzanstein_worker_rank_seconds_total", "instance, rank, phase", _NODE),),
            stacked=True,
            runbook="slow-rank",
        ),
        Panel(
            "Slowness",
            "Computing time over the median of the other ranks.",
            "short",
            (Query(f"ryzanstein_worker_rank_slowness{{{_NODE}}}", "{{instance}} rank {{rank}}"),),
            runbook="slow-rank",
        ),
        Panel("Steps", "Duration, sampled.", "s", quantiles("ryzanstein_worker_step_seconds", "rank", _NODE, "rank {{rank}} ")),
        Panel(
            "Steps begun",
            "A rank that begins none stands still.",
            "short",
            (rate_by("ryzanstein_worker_rank_steps_total", "instance, rank", _NODE),),
            runbook="rank-stalled",
        ),
        Panel(
            "Memory of ranks",
            "Resident.",
            "bytes",
            (Query(f"ryzanstein_worker_rank_resident_bytes{{{_NODE}}}", "{{instance}} rank {{rank}}"),),
            runbook="rank-out-of-memory",
        ),
        Panel(
            "Losses",
            "Ranks that were lost and restarted.",
            "short",
            (
                Query(
                    f"sum by (instance, cause) (increase(ryzanstein_worker_rank_losses_total{{{_NODE}}}[5m]))",
                    "{{instance}} {{cause}}",
                ),
            ),
            runbook="rank-died",
        ),
    ),
)
_STEPS = Row(
    "Steps and queue",
    (
        Panel("Tokens of a step", "Prompt and answer.", "short", quantiles("ryzanstein_worker_step_tokens", "instance", _NODE)),
        Panel("Sequences of a step", "Running.", "short", quantiles("ryzanstein_worker_step_sequences", "instance", _NODE)),
        Panel(
            "Sequences",
            "Running, and waiting by priority.",
            "short",
            (
                Query(f"sum by (instance) (ryzanstein_worker_running{{{_NODE}}})", "{{instance}} running"),
                Query(
                    f"sum by (instance, priority) (ryzanstein_worker_class_waiting{{{_NODE}}})",
                    "{{instance}} waiting {{priority}}",
                ),
            ),
            runbook="overload",
        ),
    ),
)
_MEMORY = Row(
    "KV cache",
    (
        Panel(
            "Memory of the cache",
            "By what it is used for.",
            "bytes",
            (Query(f"sum by (kind) (ryzanstein_worker_kv_bytes{{{_NODE}}})", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Blocks in use",
            "Of those that the engine may use.",
            "percentunit",
            (
                Query(
                    f"ryzanstein_worker_kv_blocks_held{{{_NODE}}} / ryzanstein_worker_kv_blocks_limit{{{_NODE}}}",
                    "{{instance}} {{model}}",
                ),
            ),
        ),
        Panel(
            "Paused sequences",
            "Paused for their blocks.",
            "short",
            (rate_by("ryzanstein_worker_preemptions_total", "instance", _NODE),),
        ),
    ),
)
RANKS = Board(
    "ranks",
    "Ryzanstein: node and ranks",
    (_RANKS, _STEPS, _MEMORY),
    {"instance": "ryzanstein_worker_running", "model": "ryzanstein_worker_running"},
)
