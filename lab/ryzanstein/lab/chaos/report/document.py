"""The failure budget as JSON, seconds throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ryzanstein.lab.chaos.report.budget import BudgetRow, Quantiles
from ryzanstein.lab.machine import machine


@dataclass(frozen=True, slots=True)
class CampaignFacts:
    """How the figures were made.

    `not_run` maps faults that this machine does not allow to the reason.
    """

    command: str
    seed: str
    runs: int
    clients: int
    took_s: float
    not_run: dict[str, str]


def document(rows: Sequence[BudgetRow], campaign: CampaignFacts) -> dict[str, Any]:
    """Returns the document: `faults` as `bench failover --json` promises, and more."""
    return {"faults": [_fault(row) for row in rows], "machine": machine(), "campaign": asdict(campaign)}


def _fault(row: BudgetRow) -> dict[str, Any]:
    bounds = row.fault.bounds
    return {
        "fault": row.fault.name,
        "what": row.fault.what,
        "layout": str(row.fault.layout),
        "runs": row.runs,
        "detected_s": _quantiles(row.detected_s),
        "detected_by": dict(row.detected_by),
        "rerouted_s": _quantiles(row.rerouted_s),
        "first_token_s": _quantiles(row.first_token_s),
        "serving_s": _quantiles(row.serving_s),
        "startup_s": row.startup_s,
        "whole_again_s": _quantiles(row.whole_s),
        "targets": {
            "detected_s": bounds.detected_s,
            "rerouted_s": bounds.rerouted_s,
            "serving_s": bounds.serving_s,
            "first_token_s": bounds.first_token_s,
        },
        "requests": row.requests,
        "tokens": row.tokens,
        "tokens_lost": row.lost,
        "tokens_repeated": row.repeated,
        "requests_failed": row.failed,
        "answers_changed": row.changed,
        "answers_with_a_form": row.formed,
        "answers_invalid": row.invalid,
        "failures": list(row.failures),
        "clients_saw": dict(row.troubles),
        "metrics_moved": dict(row.metrics),
        "log_lines": dict(row.log_lines),
        "beats": row.beats,
        "false_alarms": row.alarms,
        "unwanted": dict(row.unwanted),
        "other_models": {
            "answers": row.spared,
            "longest_pause_s": _quantiles(row.spared_pause_s),
            "longest_pause_without_a_fault_s": _quantiles(row.usual_pause_s),
            "target_s": row.fault.spared_pause_s,
        },
        "missed": list(row.misses),
    }


def _quantiles(quantiles: Quantiles) -> dict[str, float | int | None]:
    return {"p50": quantiles.p50, "p99": quantiles.p99, "count": quantiles.count}
