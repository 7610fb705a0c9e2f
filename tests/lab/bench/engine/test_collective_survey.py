from __future__ import annotations

import pytest

from ryzanstein.lab.bench.engine.collectives.messages import CollectiveRan
from ryzanstein.lab.bench.engine.collectives.survey import Samples, bus_bytes_per_s, latencies_s, percentile


def test_a_run_lasts_from_the_last_entry_to_the_last_exit() -> None:
    ran = [CollectiveRan(0, [1_000, 20_000], [9_000, 24_000]), CollectiveRan(1, [4_000, 10_000], [7_000, 25_000])]
    assert latencies_s(ran) == pytest.approx([5e-6, 5e-6])


@pytest.mark.parametrize(
    ("op", "ranks", "bytes_per_s"),
    [("all_reduce", 2, 100.0), ("all_reduce", 4, 150.0), ("all_gather", 4, 75.0), ("broadcast", 4, 100.0)],
)
def test_bus_bandwidth_corrects_for_what_each_link_carries(op: str, ranks: int, bytes_per_s: float) -> None:
    assert bus_bytes_per_s(op, ranks, 200, 2.0) == pytest.approx(bytes_per_s)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert (percentile([7.0], 0.5), percentile([7.0], 0.99)) == (7.0, 7.0)


def test_as_many_runs_as_fit_into_the_time_and_at_least_one() -> None:
    samples = Samples()
    samples.probe([CollectiveRan(0, [0, 2_000_000], [1_000_000, 4_000_000])])
    assert samples.latencies_s == []
    assert (samples.iterations(0.1), samples.iterations(0.0), samples.iterations(1e9)) == (50, 1, 20_000)
