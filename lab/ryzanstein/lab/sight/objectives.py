"""The rules of the objectives: bad parts of events over seven windows, and alerts on how fast they spend the error budget.

Windows and factors are those of the SRE workbook's multi-window, multi-burn-rate alerts: 14.4 times the budget spends 2 % of a
month in an hour. The short window ends the alert soon after the fault. Few requests prove nothing: each alert needs ten.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_ENOUGH = 10
_HEAD = """# Generated from objectives.toml: `python -P -m ryzanstein.lab.sight` writes it.
groups:
"""


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective. `within_s` is 0 where events are good or bad by themselves."""

    name: str
    good: float
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Indicator:
    """What an objective is about. The counters are of events that may be good or bad, without a window."""

    alert: str
    events: str
    kept: str
    runbook: str
    summary: str


@dataclass(frozen=True, slots=True)
class _Burn:
    """A speed of an alert: pairs of a factor, a long window and a short one."""

    name: str
    pairs: tuple[tuple[float, str, str], ...]
    lasting: str
    severity: str


_ENDED = 'ryzanstein_router_generations_total{outcome!="moved"}'
_FAILED = 'ryzanstein_router_generations_total{outcome=~"internal|unavailable|deadline_exceeded|unknown|data_loss"}'
_INDICATORS = {
    "availability": _Indicator("ErrorBudget", _ENDED, "", "README.md", "answers of {{ $labels.model }} failed"),
    "first_token": _Indicator(
        "FirstTokenBudget",
        "ryzanstein_router_time_to_first_token_seconds_count",
        "ryzanstein_router_time_to_first_token_seconds_bucket",
        "overload.md",
        "first tokens of {{ $labels.model }} were late",
    ),
    "pause": _Indicator(
        "PauseBudget",
        "ryzanstein_router_longest_pause_seconds_count",
        "ryzanstein_router_longest_pause_seconds_bucket",
        "README.md",
        "answers of {{ $labels.model }} paused",
    ),
}
_BURNS = (
    _Burn("Fast", ((14.4, "1h", "5m"), (6, "6h", "30m")), "2m", "page"),
    _Burn("Slow", ((3, "1d", "2h"), (1, "3d", "6h")), "1h", "ticket"),
)


def read_objectives(path: Path) -> list[Objective]:
    """Returns the objectives of the table."""
    return [Objective(name, **values) for name, values in tomllib.loads(path.read_text()).items()]


def objective_rules(path: Path) -> str:
    """Returns the text of rules/objectives.yaml."""
    objectives = read_objectives(path)
    lines = ["  - name: ryzanstein-objectives", "    rules:"]
    for objective in objectives:
        for window in WINDOWS:
            lines += _recorded(objective, window)
    lines += ["  - name: ryzanstein-budgets", "    rules:"]
    for objective in objectives:
        for burn in _BURNS:
            lines += _alert(objective, burn)
    return _HEAD + "\n".join(lines) + "\n"


def _recorded(objective: Objective, window: str) -> Iterator[str]:
    """Yields the rule that records the bad part of the events within a window."""
    events = _INDICATORS[objective.name].events
    total = f"sum by (model) (rate({events}[{window}]))"
    yield f"      - record: model:ryzanstein_bad:ratio_rate{window}"
    yield "        expr: |-"
    if objective.within_s:
        kept = f'{_INDICATORS[objective.name].kept}{{le="{objective.within_s}"}}'
        yield f"          1 - sum by (model) (rate({kept}[{window}])) / {total}"
    else:
        yield f"          (sum by (model) (rate({_FAILED}[{window}])) or 0 * {total})"
        yield f"            / {total}"
    yield f"        labels: {{slo: {objective.name}}}"


def _alert(objective: Objective, burn: _Burn) -> Iterator[str]:
    """Yields the rule that fires when the budget is spent at this speed."""
    indicator, budget = _INDICATORS[objective.name], round(1 - objective.good, 6)
    yield f"      - alert: Ryzanstein{indicator.alert}{burn.name}"
    yield "        expr: |-"
    yield "          ("
    for number, (factor, *windows) in enumerate(burn.pairs):
        bad = (f'model:ryzanstein_bad:ratio_rate{window}{{slo="{objective.name}"}}' for window in windows)
        yield f"            {'or ' if number else ''}({' and '.join(f'{each} > {factor} * {budget}' for each in bad)})"
    yield f"          ) and on (model) sum by (model) (increase({indicator.events}[{burn.pairs[0][1]}])) > {_ENOUGH}"
    yield f"        for: {burn.lasting}"
    yield f"        labels: {{severity: {burn.severity}}}"
    yield "        annotations:"
    yield f"          summary: '{{{{ $value | humanizePercentage }}}} of the {indicator.summary}.'"
    yield f"          runbook_url: docs/operate/runbooks/{indicator.runbook}"
