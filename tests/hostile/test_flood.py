"""A short flood of what `python -m tests.hostile.flood` sends for long."""

from __future__ import annotations

import pytest
from tests.hostile.flood import flood
from tests.hostile.vitals import Vitals

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


async def test_random_inputs_on_every_port_leave_a_cluster_as_it_was() -> None:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as cluster:
        report = await flood(cluster, 1500, seed=1)
    assert report.inputs == 1500
    assert sum(count for kind, count in report.outcomes.items() if kind.startswith("grpc INVALID_ARGUMENT")) > 100
    assert report.violations() == [], report.text()


def test_what_a_flood_must_not_do_is_a_violation() -> None:
    from tests.hostile.flood import Report

    calm, other = Vitals(1, 10**8, 20), Vitals(2, 10**9, 99)
    report = Report(before={"router-0": calm}, after={"router-0": other}, bad_lines={"router-0": ["Traceback"]})
    report.outcomes["broken http 500"] += 1
    assert len(report.violations()) == 5
    assert Report(before={"router-0": calm}, after={"router-0": calm}, bad_lines={"router-0": []}).violations() == []
