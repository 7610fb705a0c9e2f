"""A recording is what Prometheus would have of the same services, in promtool's notation."""

from __future__ import annotations

from pathlib import Path

import yaml
from prometheus_client import Counter, Histogram

from ryzanstein.lab.sight.recording import Recording, UsedSeries
from ryzanstein.observe.metrics import MetricsServer, new_registry

RULES = """
expr: rate(ryzanstein_router_a_total[5m]) > rate(ryzanstein_router_b_seconds_bucket{le="1.0"}[5m]) and up == 1
"""


def test_a_recording_has_what_rules_use_and_marks_what_ended(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    registry = new_registry()
    counted = Counter("ryzanstein_router_a", "Used.", ["cause"], registry=registry)
    Histogram("ryzanstein_router_b_seconds", "Used.", buckets=(1.0, 2.0), registry=registry)
    Counter("ryzanstein_router_c", "Unused.", registry=registry)
    server = MetricsServer(registry, "127.0.0.1", 0)
    recording = Recording(
        {"router-0": ("router", f"http://127.0.0.1:{server.port}/metrics")}, UsedSeries([tmp_path / "rules.yaml"]), 5.0
    )
    recording.scrape()
    counted.labels("x").inc()
    recording.scrape()
    counted.labels("x").inc(0.5)
    recording.scrape()
    server.close()
    for _ in range(3):
        recording.scrape()

    recording.write(tmp_path / "recorded.yaml", "About.")
    assert (tmp_path / "recorded.yaml").read_text().startswith("# About.\n")
    written = yaml.safe_load((tmp_path / "recorded.yaml").read_text())
    of_it = 'instance="router-0", job="router"'
    assert {each["series"]: each["values"] for each in written["input_series"]} == {
        f"up{{{of_it}}}": "1+0x2 0+0x2",
        f'ryzanstein_router_a_total{{cause="x", {of_it}}}': "_ 1 1.5 stale _x2",
        f'ryzanstein_router_b_seconds_bucket{{{of_it}, le="1.0"}}': "0+0x2 stale _x2",
    }
