"""Nodes of one machine get GPUs of their own, or none: decided from counts, never run on hardware."""

from __future__ import annotations

import pytest

from ryzanstein.cli.node_devices import NodeDevices
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError
from ryzanstein.process.gpus import Gpus

FOUR = Gpus(("0", "1", "GPU-c", "GPU-d"), "0,1,GPU-c,GPU-d")


def test_each_node_sees_its_own_gpus_and_all_of_the_memory_there() -> None:
    devices = NodeDevices.chosen("auto", 2, 2, FOUR)
    assert [devices.prefix(number)[1] for number in (0, 1)] == ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=GPU-c,GPU-d"]
    cluster = LocalCluster(ClusterSpec(MODEL_DIR, devices=devices))
    cluster._describe()
    for node, names in (("node-0", "0,1"), ("node-1", "GPU-c,GPU-d")):
        command = cluster.services[node]._command
        assert command[0].endswith("/env")
        assert command[1] == f"CUDA_VISIBLE_DEVICES={names}"
        assert command[command.index("--device") + 1] == "cuda"
        assert command[command.index("--model-memory-bytes") + 1] == "0"
    assert "--device" not in cluster.services["router-0"]._command
    cluster.stop()


@pytest.mark.parametrize(
    ("asked", "gpus", "unused"),
    [
        ("auto", Gpus(("0",)), "no GPU is used: a cluster of 2 nodes of 2 ranks needs 4 GPUs, 1 is visible"),
        ("auto", Gpus(), ""),
        ("cpu", FOUR, ""),
    ],
)
def test_with_too_few_gpus_all_nodes_use_cpus(asked, gpus, unused) -> None:
    devices = NodeDevices.chosen(asked, 2, 2, gpus)
    assert (devices.device, devices.prefix(1), devices.unused) == ("cpu", (), unused)


def test_too_few_gpus_are_refused_if_they_are_asked_for() -> None:
    with pytest.raises(RyzansteinError, match=r"^a cluster of 2 nodes of 2 ranks needs 4 GPUs, 1 is visible; choose"):
        NodeDevices.chosen("cuda", 2, 2, Gpus(("0",)))
