"""What a sample of collectives says of a model's ranks."""

from ryzanstein.worker.supervision.group import CollectiveTiming
from ryzanstein.worker.telemetry import WorkerTelemetry


def value(telemetry: WorkerTelemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"ryzanstein_worker_collective_{name}", labels)


def test_waits_and_transfers_are_shown_by_operation_and_who_came_last_by_rank() -> None:
    telemetry = WorkerTelemetry()
    telemetry.ranks.collectives.ready(2)
    assert value(telemetry, "last_total", rank="1") == 0, "so that increase() sees the first time"
    telemetry.ranks.collectives.observe(
        [
            CollectiveTiming("all_reduce", 0.002, 0.001, 1),
            CollectiveTiming("all_reduce", 0.004, 0.003, 1),
            CollectiveTiming("broadcast", 0.0, 0.5, None),
        ]
    )
    assert value(telemetry, "skew_seconds_sum", op="all_reduce") == 0.006
    assert value(telemetry, "transfer_seconds_count", op="all_reduce") == 2
    assert value(telemetry, "transfer_seconds_sum", op="broadcast") == 0.5
    assert value(telemetry, "last_total", rank="1") == 2
    assert value(telemetry, "late_seconds_total", rank="1") == 0.006
    assert value(telemetry, "last_total", rank="0") == 0


def test_a_rank_alone_comes_last_to_nothing() -> None:
    telemetry = WorkerTelemetry()
    telemetry.ranks.collectives.ready(1)
    assert value(telemetry, "last_total", rank="0") is None
