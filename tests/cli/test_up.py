"""`ryzanstein up`: what it decides before anything runs."""

from __future__ import annotations

import pytest

from ryzanstein.cli.processes.cluster import ClusterSpec
from ryzanstein.cli.up.command import crowding_of
from ryzanstein.demo import MODEL_DIR


@pytest.mark.parametrize(
    ("spec", "cores", "message"),
    [
        (ClusterSpec(MODEL_DIR, num_nodes=2, tp=2), 4.0, None),
        (ClusterSpec(MODEL_DIR, num_nodes=2, tp=2), 0.5, "4 threads share 0.5 cores: it works"),
        (
            ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, more_models=(MODEL_DIR,), threads_per_rank=3),
            2.0,
            "6 threads share 2 cores",
        ),
    ],
)
def test_more_threads_than_cores_is_said(spec, cores, message) -> None:
    sentence = crowding_of(spec, cores)
    assert sentence is None if message is None else str(sentence).startswith(message)
