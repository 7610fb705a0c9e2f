"""What a dashboard shows: rows of panels, each with its queries. Nothing here knows Grafana."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the legend of its series. `exemplars`: points of it lead to traces."""

    expression: str
    legend: str
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `unit` is Grafana's name of it. `runbook` is the page for what the panel shows when it is wrong."""

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels beside each other, three in a line, under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `name` is its file and its uid; `choices` are its variables, each a label by the metric that has it."""

    name: str
    title: str
    rows: tuple[Row, ...]
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


def without_variables(expression: str, window: str) -> str:
    """Returns the expression for all values of the dashboard's variables, with rates over this window."""
    for variable in ("$instance", "$model"):
        expression = expression.replace(variable, ".*")
    return expression.replace("$__rate_interval", window)


def quantiles(metric: str, by: str, selected: str = "", legend: str = "", *, exemplars: bool = False) -> tuple[Query, ...]:
    """Returns the median and the 99th percentile of a histogram. `by` is a label, or empty for all together.

    `exemplars`: the histogram has some.
    """
    labels = ", ".join(filter(None, ("le", by)))
    rate = f"sum by ({labels}) (rate({metric}_bucket{{{selected}}}[$__rate_interval]))"
    shown = legend or (f"{{{{{by}}}}} " if by else "")
    return tuple(
        Query(f"histogram_quantile({part}, {rate})", f"{shown}P{part * 100:.0f}", exemplars=exemplars and part > 0.5)
        for part in (0.5, 0.99)
    )


def rate_by(metric: str, by: str, selected: str = "") -> Query:
    """Returns a counter's rate for each value of a label."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"sum by ({by}) (rate({metric}{{{selected}}}[$__rate_interval]))", legend)
