"""Each fault fires its alerts and no others: the rules run over series that a cluster had, or over series written by hand.

`recorded/` is written by `python -P -m ryzanstein.lab.sight.record`; `written.yaml` is written by hand.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from ryzanstein.lab.sight.__main__ import FOLDER

HERE = Path(__file__).parent
RULES = [str(path) for path in sorted((FOLDER / "rules").glob("*.yaml"))]
RECORDED = {
    "calm": set(),
    "calm_hour": set(),
    "node_killed": {"NodeDied", "LeaseExpired"},
    "rank_stalled": {"RankStalled"},
    "store_outage": {"SessionStoreSqliteFails"},
    "router_killed": {"RouterDown", "NoRouters"},
    "all_nodes_killed": {"NodeDied", "LeaseExpired", "NoNodes"},
}


@dataclass(frozen=True)
class Case:
    """Series, and the alerts that fire at any time while they last. `background` may last longer."""

    name: str
    fires: frozenset[str]
    interval: str
    series: dict[str, str]
    background: dict[str, str] = field(default_factory=dict)

    @property
    def interval_s(self) -> int:
        return int(self.interval.removesuffix("s"))

    @property
    def lasts_s(self) -> int:
        return self.interval_s * (max(map(_length, self.series.values())) - 1)


def _length(values: str) -> int:
    """How many samples the notation has: `1+0x3` four, `_x3` three."""
    parts = (part.partition("x") for part in values.split())
    return sum(int(times) + (value != "_") if times else 1 for value, _, times in parts)


def _written() -> list[Case]:
    cases = yaml.safe_load((HERE / "written.yaml").read_text())
    calm = cases.pop("calm")
    return [Case(name, frozenset(each["fires"]), each["interval"], each["series"], calm) for name, each in cases.items()]


def _recorded() -> list[Case]:
    cases = []
    for path in sorted((HERE / "recorded").iterdir()):
        read = yaml.safe_load(path.read_text())
        series = {each["series"]: each["values"] for each in read["input_series"]}
        cases.append(Case(path.stem, frozenset(RECORDED[path.stem]), read["interval"], series))
    return cases


def _test(case: Case, severities: dict[str, str]) -> dict[str, Any]:
    """A test of promtool that asks for all alerts that fired."""
    names = sorted(f"Ryzanstein{name}" for name in case.fires)
    expected = [{"labels": f'{{alertname="{name}", severity="{severities[name]}"}}', "value": 1} for name in names]
    whole = f"{case.lasts_s + case.interval_s}s"
    fired = f'group by (alertname, severity) (max_over_time(ALERTS{{alertstate="firing"}}[{whole}]))'
    return {
        "name": case.name,
        "interval": case.interval,
        "input_series": [{"series": series, "values": values} for series, values in (case.background | case.series).items()],
        "promql_expr_test": [{"expr": fired, "eval_time": f"{case.lasts_s}s", "exp_samples": expected}],
    }


def _judge(promtool: str, cases: list[Case], alerts: list[dict[str, Any]], folder: Path) -> None:
    severities = {alert["alert"]: alert["labels"]["severity"] for alert in alerts}
    path = folder / "test.yaml"
    step = min((case.interval for case in cases), key=lambda interval: int(interval.removesuffix("s")))
    tests = [_test(case, severities) for case in cases]
    path.write_text(json.dumps({"rule_files": RULES, "evaluation_interval": step, "tests": tests}))
    done = subprocess.run((promtool, "test", "rules", str(path)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, re.sub(r"time: ", "\ntime: ", done.stdout + done.stderr)


def test_every_recording_is_there() -> None:
    assert {case.name for case in _recorded()} == set(RECORDED)


def test_every_alert_is_fired_by_a_fault(alerts: list[dict[str, Any]]) -> None:
    fired = {f"Ryzanstein{name}" for case in (*_recorded(), *_written()) for name in case.fires}
    assert {alert["alert"] for alert in alerts} == fired


@pytest.mark.parametrize("case", _recorded(), ids=lambda case: case.name)
def test_a_recorded_fault_fires_its_alerts_and_no_others(
    case: Case, part: Callable[[str], str], tmp_path: Path, alerts: list[dict[str, Any]]
) -> None:
    _judge(part("promtool"), [case], alerts, tmp_path)


@pytest.mark.parametrize("interval", sorted({case.interval for case in _written()}))
def test_written_series_fire_their_alerts_and_no_others(
    interval: str, part: Callable[[str], str], tmp_path: Path, alerts: list[dict[str, Any]]
) -> None:
    _judge(part("promtool"), [case for case in _written() if case.interval == interval], alerts, tmp_path)
