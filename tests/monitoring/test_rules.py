"""The rules are valid, name what exists, and each alert has its page and each page its alert."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ryzanstein.lab.sight.__main__ import FOLDER
from ryzanstein.lab.sight.objectives import objective_rules
from ryzanstein.lab.sight.prometheus_rules import prometheus_rule

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs" / "operate" / "runbooks"
RULES = sorted((FOLDER / "rules").glob("*.yaml"))
# What a node beside a server loses is a rank to its metrics: RankDied, RankStalled and RanksUnsound fire.
WITHOUT_ALERT = {"engine-lost"}


def test_promtool_finds_nothing_wrong(part: Callable[[str], str]) -> None:
    done = subprocess.run(
        [part("promtool"), "check", "rules", "--lint=all", "--lint-fatal", *map(str, RULES)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_of_the_objectives_are_those_of_their_table() -> None:
    assert (FOLDER / "rules" / "objectives.yaml").read_text() == objective_rules(FOLDER / "objectives.toml")


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_the_resources_of_the_operator_have_the_same_rules(path: Path) -> None:
    text = (FOLDER / "prometheus-rules" / path.name).read_text()
    assert text == prometheus_rule(path)
    assert yaml.safe_load(text)["spec"] == yaml.safe_load(path.read_text())


def test_every_rule_names_what_exists(rules: list[dict[str, Any]], unknown: Any) -> None:
    assert {rule.get("alert", rule.get("record")): found for rule in rules if (found := unknown(rule["expr"]))} == {}


def test_every_threshold_of_a_quantile_is_the_bound_of_a_bucket(rules: list[dict[str, Any]], known: dict[str, Any]) -> None:
    quantiles = [rule["expr"] for rule in rules if "histogram_quantile" in rule["expr"]]
    assert quantiles
    for expression in quantiles:
        (metric,), (threshold,) = re.findall(r"\w+_bucket", expression), re.findall(r"> ([\d.]+)$", expression)
        assert threshold in known[metric].bounds, expression


def test_every_alert_has_a_class_and_a_summary_and_a_name_of_its_own(alerts: list[dict[str, Any]]) -> None:
    assert max(Counter(alert["alert"] for alert in alerts).values()) == 1
    for alert in alerts:
        assert alert["alert"].startswith("Ryzanstein")
        assert alert["labels"]["severity"] in {"page", "ticket", "info"}
        assert alert["annotations"]["summary"].endswith(".")


def test_every_alert_leads_to_a_page(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert path.startswith("docs/operate/"), alert["alert"]
        titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
        assert not anchor or anchor in {title.lower().replace(" ", "-") for title in titles}, alert["alert"]


def test_every_runbook_has_an_alert(alerts: list[dict[str, Any]]) -> None:
    linked = {Path(alert["annotations"]["runbook_url"]).stem for alert in alerts}
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - linked == WITHOUT_ALERT


def test_what_fires_on_a_page_is_what_its_alert_says(alerts: list[dict[str, Any]]) -> None:
    """Where a page has one alert. One with several says what they have in common."""
    pages = Counter(alert["annotations"]["runbook_url"] for alert in alerts)
    for alert in alerts:
        url = alert["annotations"]["runbook_url"]
        if pages[url] == 1 and "runbooks" in url:
            blocks = re.findall(r"^```promql\n(.*?)^```", (ROOT / url).read_text(), re.MULTILINE | re.DOTALL)
            assert _words(alert["expr"]) in map(_words, blocks), alert["alert"]


def _words(expression: str) -> str:
    return " ".join(expression.split())
