"""What the processes of a cell used in a phase: processor time, memory, descriptors, messages, lateness."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.status.scrape import page
from ryzanstein.lab.bench.control.cluster import ControlCluster, MeasuredService
from ryzanstein.lab.bench.control.standins.traffic import Traffic

_LAG, _SCRAPE_S = "loop_lag_seconds_bucket", 30.0
# Counters of the services, added up over their labels, and how they are called here.
_COUNTED = {
    "ryzanstein_router_link_losses_total": "links_lost",
    "ryzanstein_router_view_resyncs_total": "snapshots_taken",
    "ryzanstein_orchestrator_departures_total": "departures",
    "ryzanstein_orchestrator_beats_total": "beats",
    "ryzanstein_orchestrator_stalls_total": "stalls",
}


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """What a service's metrics say at a moment. `lag`: how often its loop was late by at most so many seconds."""

    counted: Mapping[str, float]
    lag: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class ControlSample:
    """All processes at a moment, by name."""

    at: float
    cpu_s: Mapping[str, float]
    rss_bytes: Mapping[str, int]
    descriptors: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    metrics: Mapping[str, ServiceMetrics]
    latest_s: Mapping[str, float]


async def sampled(cluster: ControlCluster, traffic: Mapping[str, Traffic], *, metrics_first: bool) -> ControlSample:
    """Reads everything.

    Reading metrics costs a service time, which is kept outside a phase: before it they are read first, after it last.
    """
    metrics = await _metrics(cluster) if metrics_first else {}
    at, found = asyncio.get_running_loop().time(), _processes(cluster)
    cpu_s = {name: _cpu_s(process) for name, process in found.items()}
    rss_bytes = {name: process.memory_info().rss for name, process in found.items()}
    descriptors = {name: process.num_fds() for name, process in found.items()}
    latest_s = {each.name: each.latest_s for each in cluster.stand_ins}
    for each in cluster.stand_ins:
        each.latest_s = 0.0
    return ControlSample(at, cpu_s, rss_bytes, descriptors, traffic, metrics or await _metrics(cluster), latest_s)


def _processes(cluster: ControlCluster) -> dict[str, psutil.Process]:
    running = [(each.name, each.process) for each in cluster.services]
    running += [(each.name, each.process) for each in cluster.stand_ins]
    return {name: psutil.Process(process.pid) for name, process in running if process and process.returncode is None}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _metrics(cluster: ControlCluster) -> dict[str, ServiceMetrics]:
    services = [each for each in cluster.services if each.process and each.process.returncode is None]
    found = await asyncio.gather(*(asyncio.to_thread(_read, each) for each in services))
    return {service.name: each for service, each in zip(services, found, strict=True)}


def _read(service: MeasuredService) -> ServiceMetrics:
    counted: dict[str, float] = {}
    lag: dict[float, float] = {}
    try:
        text = page(f"http://127.0.0.1:{service.metrics_port}/metrics", _SCRAPE_S)
    except OSError:
        return ServiceMetrics(counted, lag)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(_LAG):
                lag[float(sample.labels["le"])] = sample.value
            elif name := _COUNTED.get(sample.name):
                counted[name] = counted.get(name, 0.0) + sample.value
    return ServiceMetrics(counted, lag)


def used(before: ControlSample, after: ControlSample) -> list[dict[str, Any]]:
    """Returns a row for each process. One that was started in the phase counts from its start."""
    seconds = max(after.at - before.at, 1e-9)
    rows = []
    for name, cpu_s in after.cpu_s.items():
        earlier = before.cpu_s.get(name, 0.0)
        spent = cpu_s - earlier if cpu_s >= earlier else cpu_s
        rows.append(
            {
                "process": name,
                "cpu_s": round(spent, 3),
                "cores": round(spent / seconds, 4),
                "rss_bytes": after.rss_bytes[name],
                "descriptors": after.descriptors[name],
                **_traffic_row(before.traffic.get(name, Traffic()), after.traffic.get(name, Traffic())),
                **_metrics_row(before.metrics.get(name), after.metrics.get(name)),
                **({"report_late_max_s": after.latest_s[name]} if name in after.latest_s else {}),
            }
        )
    return rows


def _traffic_row(before: Traffic, after: Traffic) -> dict[str, int]:
    return {name: getattr(after, name) - getattr(before, name) for name in Traffic.__dataclass_fields__}


def _metrics_row(before: ServiceMetrics | None, after: ServiceMetrics | None) -> dict[str, Any]:
    if after is None or not after.lag:
        return {}
    earlier = before or ServiceMetrics({}, {})
    if earlier.lag.get(float("inf"), 0.0) > after.lag[float("inf")]:  # it was started in between
        earlier = ServiceMetrics({}, {})
    counted = {name: int(value - earlier.counted.get(name, 0.0)) for name, value in after.counted.items()}
    late = [(bound, count - earlier.lag.get(bound, 0.0)) for bound, count in sorted(after.lag.items())]
    return {"loop_lag_p99_s": _bound_of(late, 0.99), **counted}


def _bound_of(cumulated: Sequence[tuple[float, float]], share: float) -> float | None:
    """Returns the smallest bound that this share is below; None: it is above all of them, or nothing was observed."""
    total = cumulated[-1][1]
    found = next((bound for bound, count in cumulated if total and count >= share * total), None)
    return None if found == float("inf") else found
