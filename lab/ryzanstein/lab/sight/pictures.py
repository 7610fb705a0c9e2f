"""`python -P -m ryzanstein.lab.sight.pictures`: draws the dashboards as they look on a cluster that two faults strike.

Two nodes of two ranks, a router, three clients, a Prometheus that scrapes each second and has the rules of the monitoring
component. After a while of calm a node is killed and comes back; then a rank of the other one is stopped. The pictures are
docs/images/dashboard-NAME.png. They are drawn by matplotlib from the dashboards' own queries, not by Grafana.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status.scrape import page
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.sight.__main__ import FOLDER
from ryzanstein.lab.sight.dashboards import DASHBOARDS
from ryzanstein.lab.sight.dashboards.panels import Board, Panel, without_variables
from ryzanstein.lab.sight.record import FAULTS, load

IMAGES = Path(__file__).resolve().parents[4] / "docs" / "images"
_JOBS = {"router-0": "router", "node-0": "worker", "node-1": "worker", ORCHESTRATOR: ORCHESTRATOR}
_CALM_S, _AWAY_S, _BACK_S, _STALLED_S = 60.0, 15.0, 30.0, 35.0
_WINDOW, _STEP_S = "15s", 1.0
_COLUMNS, _PANEL_INCHES, _DPI = 3, (5.0, 2.6), 72
_LEGEND_LINES = 6
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a graph: Unix times and values."""

    legend: str
    times: Sequence[float]
    values: Sequence[float]


class Prometheus:
    """A Prometheus that scrapes a cluster. `close` ends it."""

    def __init__(self, program: str, folder: Path, cluster: LocalCluster) -> None:
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        jobs = [
            {
                "job_name": name,
                "static_configs": [
                    {
                        "targets": [cluster.services[name].metrics_url.split("/")[2]],
                        "labels": {"job": job, "instance": name},
                    }
                ],
            }
            for name, job in _JOBS.items()
        ]
        settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": jobs}
        settings["rule_files"] = [str(path) for path in sorted((FOLDER / "rules").glob("*.yaml"))]
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
        flags = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
        address = f"--web.listen-address=127.0.0.1:{port}"
        self._process = subprocess.Popen([program, *flags, address, "--log.level=error"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(_WAIT_S)

    def wait(self) -> None:
        """Returns when it answers. Raises RuntimeError if it does not."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                page(f"{self._url}/-/ready")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise RuntimeError("prometheus does not answer")

    def ask(self, expression: str, began: float, ended: float, legend: str) -> Iterator[Series]:
        """Yields the series of an expression between two Unix times."""
        query = urllib.parse.urlencode({"query": expression, "start": began, "end": ended, "step": _STEP_S})
        for found in json.loads(page(f"{self._url}/api/v1/query_range?{query}", _WAIT_S))["data"]["result"]:
            values = {float(at): float(value) for at, value in found["values"]}
            every = [began + step * _STEP_S for step in range(int((ended - began) / _STEP_S) + 1)]
            known = [next((values[at] for at in values if abs(at - each) < _STEP_S / 2), math.nan) for each in every]
            if not all(map(math.isnan, known)):
                yield Series(_legend(legend, found["metric"]), every, known)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), template).strip()


def draw(board: Board, prometheus: Prometheus, began: float, ended: float, path: Path) -> None:
    """Draws a dashboard into a file."""
    heights = [math.ceil(len(row.panels) / _COLUMNS) for row in board.rows]
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * _COLUMNS, height * sum(heights)), dpi=_DPI, layout="constrained")
    parts = figure.subfigures(len(board.rows), 1, height_ratios=heights, squeeze=False)
    for row, (part,), num_lines in zip(board.rows, parts, heights, strict=True):
        part.suptitle(row.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        places = list(part.subplots(num_lines, _COLUMNS, squeeze=False).flat)
        for place, panel in zip(places, row.panels, strict=False):
            _graph(place, panel, prometheus, began, ended)
        for place in places[len(row.panels) :]:
            place.axis("off")
    figure.savefig(path)


def _graph(place: Axes, panel: Panel, prometheus: Prometheus, began: float, ended: float) -> None:
    lines = [
        series
        for query in panel.queries
        for series in prometheus.ask(without_variables(query.expression, _WINDOW), began, ended, query.legend)
    ]
    place.set_title(panel.title, fontsize=9, loc="left")
    place.tick_params(labelsize=7)
    place.set_xlim(0, ended - began)
    place.grid(alpha=0.3)
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, panel.unit)))
    if not lines:
        place.text(0.5, 0.5, "nothing of it happened", ha="center", fontsize=8, color="grey", transform=place.transAxes)
        return
    lines.sort(key=lambda series: max(filter(math.isfinite, series.values), default=0.0), reverse=True)
    if panel.stacked:
        heights = [[0.0 if math.isnan(value) else value for value in series.values] for series in lines]
        place.stackplot([at - began for at in lines[0].times], heights, labels=[series.legend for series in lines], alpha=0.6)
    else:
        for series in lines:
            place.plot([at - began for at in series.times], series.values, label=series.legend, linewidth=1)
    place.set_ylim(bottom=0)
    seen = [series.legend for series in lines if any(value > 0 for value in series.values)][:_LEGEND_LINES]
    named = {label: handle for handle, label in zip(*place.get_legend_handles_labels(), strict=True) if label in seen}
    if named:
        place.legend(named.values(), named.keys(), fontsize=6, loc="upper left", framealpha=0.6)


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    if unit == "percentunit":
        return f"{100 * value:g} %"
    if unit == "s" and 0 < value < 1:
        return f"{1e3 * value:g} ms"
    return f"{value:g} s" if unit == "s" else f"{value:g}"


@contextmanager
def _watched(program: str) -> Iterator[tuple[LocalCluster, Prometheus]]:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(ClusterSpec(MODEL_DIR)) as cluster:
        prometheus = Prometheus(program, Path(folder), cluster)
        try:
            prometheus.wait()
            yield cluster, prometheus
        finally:
            prometheus.close()


def main() -> None:
    """Makes the faults, and draws all dashboards."""
    if (program := shutil.which("prometheus")) is None:
        sys.exit("prometheus is required: a package of Debian has it")
    with _watched(program) as (cluster, prometheus), load(cluster.router_address):
        time.sleep(5.0)
        began = time.time()
        time.sleep(_CALM_S)
        with FAULTS["node_killed"](cluster):
            time.sleep(_AWAY_S)
        cluster.restart("node-1")
        time.sleep(_BACK_S)
        with FAULTS["rank_stalled"](cluster):
            time.sleep(_STALLED_S)
        ended = time.time()
        IMAGES.mkdir(exist_ok=True)
        for board in DASHBOARDS:
            path = IMAGES / f"dashboard-{board.name}.png"
            draw(board, prometheus, began, ended, path)
            print(path, os.path.getsize(path), flush=True)


if __name__ == "__main__":
    main()
