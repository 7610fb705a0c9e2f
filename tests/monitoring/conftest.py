"""The rules, the dashboards, the runbooks, and the metrics that services have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from ryzanstein.lab.reference.metric_tables import registries
from ryzanstein.lab.sight.__main__ import FOLDER

ROOT = Path(__file__).parents[2]
RULES = sorted((FOLDER / "rules").glob("*.yaml"))


@dataclass(frozen=True)
class Metric:
    """A metric as a scrape names it, and the labels that it may have; of a histogram's buckets also their bounds."""

    labels: frozenset[str]
    bounds: frozenset[str] = frozenset()


def _metrics(registry: CollectorRegistry, common: frozenset[str]) -> Iterator[tuple[str, Metric]]:
    for collector in set(registry._names_to_collectors.values()):
        labels = frozenset(getattr(collector, "_labelnames", ())) | common
        bounds = frozenset(map(str, getattr(collector, "_upper_bounds", ())))
        for family in collector.collect():
            if family.type == "counter":
                yield f"{family.name}_total", Metric(labels)
            elif family.type == "histogram":
                yield f"{family.name}_bucket", Metric(labels | {"le"}, bounds)
                yield f"{family.name}_sum", Metric(labels)
                yield f"{family.name}_count", Metric(labels)
            else:
                yield family.name, Metric(labels)


@pytest.fixture(scope="session")
def known() -> dict[str, Metric]:
    """The metrics of the services by name, with what Prometheus and the recording rules add."""
    target = frozenset({"instance", "job"})
    metrics = {"up": Metric(target), "ALERTS": Metric(frozenset({"alertname", "alertstate", "severity"}))}
    for service, registry in registries().items():
        metrics |= dict(_metrics(registry, target | {"model"} if service == "worker" else target))
    metrics |= {rule["record"]: Metric(frozenset({"model", "slo"})) for rule in _rules() if "record" in rule}
    return metrics


def _rules() -> list[dict[str, Any]]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="session")
def rules() -> list[dict[str, Any]]:
    """Every rule."""
    return _rules()


@pytest.fixture(scope="session")
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules that are alerts."""
    return [rule for rule in rules if "alert" in rule]


def _walk(node: Any) -> Iterator[Any]:
    yield node
    if isinstance(node, promql_parser.MatrixSelector):
        yield from _walk(node.vector_selector)
    for name in ("lhs", "rhs", "expr", "param"):
        below = getattr(node, name, None)
        if isinstance(below, promql_parser.Expr):
            yield from _walk(below)
    for argument in getattr(node, "args", None) or ():
        yield from _walk(argument)


def problems(expression: str, known: dict[str, Metric]) -> list[str]:
    """What an expression names that does not exist: metrics, labels of them, bounds of buckets."""
    found = []
    for node in _walk(promql_parser.parse(expression)):
        if not isinstance(node, promql_parser.VectorSelector):
            continue
        metric = known.get(node.name)
        if metric is None:
            found.append(f"no metric {node.name}")
            continue
        for matcher in node.matchers.matchers:
            if matcher.name not in metric.labels:
                found.append(f"{node.name} has no label {matcher.name}")
            if matcher.name == "le" and matcher.value not in metric.bounds:
                found.append(f"{node.name} has no bucket up to {matcher.value}")
    grouped = {
        label for labels in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression) for label in labels.split(", ")
    }
    every = {label for metric in known.values() for label in metric.labels} | {"", "alertname"}
    return found + [f"no label {label}" for label in sorted(grouped - every)]


@pytest.fixture(scope="session")
def unknown(known: dict[str, Metric]) -> Any:
    """Asks for the problems of an expression."""
    return lambda expression: problems(expression, known)
