"""What NVIDIA's library says without torch is what torch finds, and what a rank takes of a GPU is what `sizing` says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ryzanstein.process.gpus import choose_device, find_gpus, memory_bytes
from ryzanstein.worker.checkpoints.memory import available_bytes
from ryzanstein.worker.sizing import DEVICE_BYTES

pytestmark = pytest.mark.gpu

PRODUCTS = """
import torch
x = torch.randn(512, 512, device="cuda")
(x @ x).softmax(dim=1).sum().item(), (x.bfloat16() @ x.bfloat16()).sum().item()
print("computed", flush=True)
input()
"""


def test_the_visible_gpus_and_their_memory_are_those_of_torch() -> None:
    gpus = find_gpus()
    assert len(gpus.names) == torch.cuda.device_count()
    assert gpus.has_build
    for count in range(1, len(gpus.names) + 1):
        theirs = sum(torch.cuda.get_device_properties(i).total_memory for i in range(count))
        assert memory_bytes(count) == pytest.approx(theirs, rel=0.03)
    assert choose_device("auto", len(gpus.names), "tp", gpus).device == "cuda"
    assert choose_device("auto", len(gpus.names) + 1, "tp", gpus).device == "cpu"


def test_free_memory_is_that_of_the_device() -> None:
    free, _ = torch.cuda.mem_get_info(0)
    assert available_bytes(torch.device("cuda:0")) == pytest.approx(free, rel=0.05)


def test_a_rank_without_a_model_takes_no_more_than_is_planned_for_it() -> None:
    """The context, and the workspaces of products. Another process sees the context, too."""
    before, _ = torch.cuda.mem_get_info(0)
    with subprocess.Popen([sys.executable, "-c", PRODUCTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "computed\n"
        taken = before - torch.cuda.mem_get_info(0)[0]
        rank.communicate("\n", timeout=60)
    print(f"a rank takes {taken / 2**20:.0f} MiB")
    assert 100 * 2**20 < taken <= DEVICE_BYTES
