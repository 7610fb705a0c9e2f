"""What autoscalers need of each model, from the members' last reports at each scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ryzanstein.cluster import ModelReport, Node, NodeState

_PREFIX = "ryzanstein_orchestrator_model"
_STATES = ("ready", "asleep", "loading", "draining", "failed")
_STATE_OF = {NodeState.READY: "ready", NodeState.DRAINING: "draining", NodeState.FAILED: "failed"}


class ModelLoads(Collector):
    """Series for each model that a member reports. `nodes` may be called from the thread of a scrape."""

    def __init__(self, nodes: Callable[[], Iterable[Node]] = tuple) -> None:
        self.nodes = nodes

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(f"{_PREFIX}_replicas", "Nodes that have the model, by state.", labels=["model", "state"])
        yield GaugeMetricFamily(f"{_PREFIX}_running", "Sequences that run on its ready nodes.", labels=["model"])
        yield GaugeMetricFamily(f"{_PREFIX}_waiting", "Sequences that wait on its ready nodes.", labels=["model"])
        yield GaugeMetricFamily(f"{_PREFIX}_capacity", "Sequences that its ready nodes can run at once.", labels=["model"])
        yield GaugeMetricFamily(f"{_PREFIX}_kv_used_ratio", "Used share of its ready nodes' KV blocks.", labels=["model"])

    def collect(self) -> Iterator[Metric]:
        replicas, running, waiting, capacity, kv_used = self.describe()
        reports: dict[str, list[ModelReport]] = defaultdict(list)
        for node in self.nodes():
            for report in _reports(node):
                reports[report.model].append(report)
        for model, of_model in sorted(reports.items()):
            states = Counter(map(_state, of_model))
            for state in _STATES:
                replicas.add_metric([model, state], states[state])
            loads = [report.load for report in of_model if report.state is NodeState.READY]
            running.add_metric([model], sum(load.running for load in loads))
            waiting.add_metric([model], sum(load.waiting for load in loads))
            capacity.add_metric([model], sum(load.capacity for load in loads))
            blocks = sum(load.kv_blocks_total for load in loads)
            kv_used.add_metric([model], sum(load.kv_blocks_used for load in loads) / blocks if blocks else 0.0)
        yield from (replicas, running, waiting, capacity, kv_used)


def _reports(node: Node) -> Iterable[ModelReport]:
    """Returns a node's reports of models; that of an older node is made from what it has."""
    if node.plural or not node.model:
        return node.models
    report = node.report(node.model)
    return () if report is None else (report,)


def _state(report: ModelReport) -> str:
    return "asleep" if report.asleep else _STATE_OF.get(report.state, "loading")
