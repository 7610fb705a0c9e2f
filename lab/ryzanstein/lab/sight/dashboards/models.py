"""The models: how fast each answers, where its requests wait, and how long they are."""

from __future__ import annotations

from ryzanstein.lab.sight.dashboards.panels import Board, Panel, Query, Row, quantiles, rate_by

_MODEL = 'model=~"$model"'
_SPEED = Row(
    "How fast it answers",
    (
        Panel(
            "First token",
            "Time from submit to the first token.",
            "s",
            quantiles("ryzanstein_router_time_to_first_token_seconds", "model", _MODEL, exemplars=True),
            runbook="overload",
        ),
        Panel(
            "Time per output token",
            "The mean of an answer, after the first token.",
            "s",
            quantiles("ryzanstein_router_time_per_output_token_seconds", "model", _MODEL),
            runbook="slow-rank",
        ),
        Panel(
            "Longest pause",
            "Within an answer. A failover shows here.",
            "s",
            quantiles("ryzanstein_router_longest_pause_seconds", "model", _MODEL, exemplars=True),
        ),
        Panel(
            "Answers",
            "Generations that ended, by outcome.",
            "reqps",
            (rate_by("ryzanstein_router_generations_total", "model, outcome", _MODEL),),
            stacked=True,
        ),
        Panel("Tokens", "Generated.", "short", (rate_by("ryzanstein_router_tokens_total", "model", _MODEL),), stacked=True),
        Panel(
            "Prompt tokens in the prefix cache",
            "The part of the tokens looked up that was found.",
            "percentunit",
            (
                Query(
                    f'sum by (model) (rate(ryzanstein_worker_prefix_tokens_total{{outcome="hit", {_MODEL}}}[$__rate_interval]))'
                    f" / sum by (model) (rate(ryzanstein_worker_prefix_tokens_total{{{_MODEL}}}[$__rate_interval]))",
                    "{{model}}",
                ),
            ),
        ),
    ),
)
_WAITS = Row(
    "Where requests wait",
    (
        Panel(
            "Stages until the first token",
            "The mean of each, of all models.",
            "s",
            (
                Query(
                    "sum by (stage) (rate(ryzanstein_router_stage_seconds_sum[$__rate_interval]))"
                    " / sum by (stage) (rate(ryzanstein_router_stage_seconds_count[$__rate_interval]))",
                    "{{stage}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Queue of the nodes",
            "From submit to the first step that computes the attempt.",
            "s",
            quantiles("ryzanstein_worker_queue_seconds", "model", _MODEL),
            runbook="unfair-tenant",
        ),
        Panel(
            "Prefill",
            "From that step's begin to the first token.",
            "s",
            quantiles("ryzanstein_worker_prefill_seconds", "model", _MODEL),
        ),
    ),
)
_LENGTHS = Row(
    "How long they are",
    (
        Panel("Length of prompts", "Tokens.", "short", quantiles("ryzanstein_worker_prompt_tokens_length", "model", _MODEL)),
        Panel(
            "Length of answers",
            "Tokens of an attempt.",
            "short",
            quantiles("ryzanstein_worker_generated_tokens_length", "model", _MODEL),
        ),
        Panel(
            "Load beyond chance",
            "The fullest node over its fair share, and what chance explains of it.",
            "percentunit",
            (
                Query(f"max by (model) (ryzanstein_router_load_imbalance_ratio{{{_MODEL}}})", "{{model}}"),
                Query(f"max by (model) (ryzanstein_router_load_imbalance_chance_ratio{{{_MODEL}}})", "{{model}} chance"),
            ),
            runbook="load-imbalance",
        ),
    ),
)
MODELS = Board("models", "Ryzanstein: models", (_SPEED, _WAITS, _LENGTHS), {"model": "ryzanstein_router_generations_total"})
