"""What a router counted, for those who watch it without its metrics. The metrics are read, so both always agree."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.v1 import router_pb2 as pb


def figures_to_wire(telemetry: RouterTelemetry, start_time: Timestamp) -> pb.RouterFigures:
    """Returns what the router has counted since it started, at `start_time`."""
    ended: Counts[str] = Counts()
    for sample in _samples(telemetry.generations, "_total"):
        ended[sample.labels["outcome"]] += int(sample.value)
    return pb.RouterFigures(
        start_time=start_time,
        generated_tokens=_sum(telemetry.tokens, "_total"),
        prompt_tokens=_sum(telemetry.prompts.tokens, "_total"),
        running=_sum(telemetry.running),
        waiting=_sum(telemetry.waiting),
        ended=+ended,
        failovers=_sum(telemetry.failovers, "_total"),
        time_to_first_token=_distribution(telemetry.times.first_token),
        time_per_output_token=_distribution(telemetry.times.per_token),
    )


def _distribution(metric: Histogram) -> pb.Distribution:
    """Returns a histogram of all its labels together. Its last bound is infinite, and left out."""
    counts: Counts[float] = Counts()
    for sample in _samples(metric, "_bucket"):
        counts[float(sample.labels["le"])] += int(sample.value)
    bounds = sorted(counts)
    return pb.Distribution(
        upper_bounds=bounds[:-1],
        counts=[counts[bound] for bound in bounds],
        sum=sum(each.value for each in _samples(metric, "_sum")),
    )


def _sum(metric: Counter | Gauge, ending: str = "") -> int:
    return int(sum(sample.value for sample in _samples(metric, ending)))


def _samples(metric: Counter | Gauge | Histogram, ending: str) -> Iterator[Sample]:
    for family in metric.collect():
        yield from (sample for sample in family.samples if sample.name == family.name + ending)
