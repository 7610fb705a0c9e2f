"""Draws a dashboard: Grafana's JSON, in the schema of Grafana 11.6."""

from __future__ import annotations

import json
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, DataSourceRef, VariableRefresh

from ryzanstein.lab.sight.dashboards.panels import Board, Panel

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "ryzanstein"
_WIDTH, _HEIGHT = 8, 8
_STACK_OPACITY = 40
_ALERTS = 'ALERTS{alertname=~"Ryzanstein.+", alertstate="firing", severity!="info"}'


def drawn(board: Board) -> str:
    """Returns the text of the dashboard's file."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"ryzanstein-{board.name}")
        .tags([_TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("Ryzanstein")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(dashboard.AnnotationQuery().name("Alerts").datasource(_SOURCE).enable(True).icon_color("red").expr(_ALERTS))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for label, metric in board.choices.items():
        made = made.with_variable(_choice(label, metric))
    ids = count(1)
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            made = made.with_panel(_graph(panel).id(next(ids)))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _choice(label: str, metric: str) -> dashboard.QueryVariable:
    """Returns the variable of a label, with which one looks at some of its values or at all."""
    return (
        dashboard.QueryVariable(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _graph(panel: Panel) -> timeseries.Panel:
    about = f"{panel.about} Runbook: docs/operate/runbooks/{panel.runbook}.md." if panel.runbook else panel.about
    graph = timeseries.Panel().title(panel.title).description(about).unit(panel.unit).datasource(_SOURCE)
    graph = graph.span(_WIDTH).height(_HEIGHT).min(0)
    if panel.stacked:
        graph = graph.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(_STACK_OPACITY)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + number))
        graph = graph.with_target(target.exemplar(True) if query.exemplars else target)
    return graph
