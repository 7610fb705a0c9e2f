"""Clusters whose nodes compute on GPUs with our own engine. Beside vLLM: tests/worker/engines/real_vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.conftest import DEMO, need
from tests.worker.engines.answering import answer_of

from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.process.gpus import find_gpus

pytestmark = pytest.mark.gpu

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "top_p": 0.95, "presence_penalty": 0.5, "min_tokens": 8}


def on_cpu(model: Path, **sampling: Any) -> dict[int, list[int]]:
    with LocalCluster(ClusterSpec(model, num_nodes=1, tp=1)) as cluster:
        return answer_of(cluster, **sampling)[0]


@pytest.mark.parametrize("tp", [1, 2])
def test_our_engine_computes_as_on_a_cpu(tp: int) -> None:
    """In float32. With two ranks the all-reduce is NCCL's."""
    need(tp)
    devices = NodeDevices.chosen("cuda", 1, tp, find_gpus())
    spec = ClusterSpec(DEMO, num_nodes=1, tp=tp, devices=devices, rank_flags=("--dtype", "float32"))
    with LocalCluster(spec) as cluster:
        greedy, sampled = answer_of(cluster)[0], answer_of(cluster, **SAMPLED)[0]
    assert greedy == on_cpu(DEMO)
    assert sampled == on_cpu(DEMO, **SAMPLED)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_node_on_a_cpu_continues_what_one_on_a_gpu_began(sampling: dict[str, Any]) -> None:
    """And the other way round, in float32. Whichever of them answers is killed."""
    devices = NodeDevices("auto", (("0",), ("-1",)))
    spec = ClusterSpec(DEMO, num_nodes=2, tp=1, devices=devices, rank_flags=("--dtype", "float32"))
    expected = on_cpu(DEMO, **sampling)
    with LocalCluster(spec) as cluster:
        for turn in range(4):
            tokens, nodes = answer_of(cluster, cluster.kill, at=5 + 7 * turn, **sampling)
            assert tokens == expected
            assert len(nodes) == 2
            cluster.restart(nodes[0])
            cluster.wait_nodes(2)
