"""What the ranks' boards say, as counters that only grow."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.supervision.group import RankProgress
from ryzanstein.worker.telemetry import NodeTelemetry, WorkerTelemetry

RANK = RankProgress(1, 77, 5, 40, "idle", 1.0, 0.0, 1, 0.01, collectives_s=2.0, compute_s=3.0, tail_s=1.0, idle_s=4.0)


def value(telemetry: WorkerTelemetry | NodeTelemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(f"ryzanstein_worker_rank_{name}_total", labels)


def test_a_rank_counts_from_its_start_and_a_new_one_adds() -> None:
    telemetry = WorkerTelemetry()
    telemetry.ranks.progress([RANK], {})
    telemetry.ranks.progress([replace(RANK, step=7, collective=56, compute_s=3.5)], {})
    telemetry.ranks.progress([replace(RANK, pid=78, step=1, collective=8, compute_s=0.25)], {})
    assert value(telemetry, "seconds", rank="1", phase="compute") == 3.75
    assert value(telemetry, "seconds", rank="1", phase="idle") == 8
    assert value(telemetry, "steps", rank="1") == 8
    assert value(telemetry, "collectives", rank="1") == 64


def test_a_step_that_was_given_up_takes_nothing_back() -> None:
    telemetry = WorkerTelemetry()
    telemetry.ranks.progress([RANK], {})
    telemetry.ranks.progress([replace(RANK, collective=3)], {})
    assert value(telemetry, "collectives", rank="1") == 43


def test_a_rank_alone_computes_all_of_a_step() -> None:
    alone = replace(RANK, collectives_s=0.0)
    assert (alone.phases_s["compute"], alone.phases_s["tail"]) == (4.0, 0.0)


def test_every_model_of_a_node_has_its_name_and_what_they_share_has_none() -> None:
    telemetry = NodeTelemetry()
    telemetry.first.ranks.progress([RANK], {})
    assert value(telemetry, "steps", rank="1") == 5, "a model that is not known yet"
    telemetry.first.model = "one"
    telemetry.add("two").ranks.progress([replace(RANK, step=9)], {})
    assert value(telemetry, "steps", rank="1", model="one") == 5
    assert value(telemetry, "steps", rank="1", model="two") == 9
    assert telemetry.registry.get_sample_value("ryzanstein_worker_loop_lag_worst_seconds") == 0
    families = [family.name for family in telemetry.registry.collect()]
    assert len(families) == len(set(families))
    telemetry.remove("two")
    assert value(telemetry, "steps", rank="1", model="two") is None
