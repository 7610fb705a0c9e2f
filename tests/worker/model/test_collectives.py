"""What collectives do when a peer is missing, and how a backend is found. Results of all backends: test_tensor_parallel."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ryzanstein.worker.collectives import CollectiveTimeout, NoProgress, OutOfStep
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.opening import GroupAddress, default_backend, open_collectives
from ryzanstein.worker.collectives.segment import MAX_RANKS, segment_bytes, slot_offset
from ryzanstein.worker.collectives.waiting import WaitPolicy


@pytest.fixture
def segment_fd() -> Iterator[int]:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, segment_bytes(2))
    yield fd
    os.close(fd)


def test_a_missing_peer_is_named_after_the_deadline(segment_fd: int) -> None:
    patience = WaitPolicy(spin_s=0.0001, deadline_s=0.05)
    alone = open_collectives(GroupAddress("shm", segment_fd), 1, 2, NoProgress(), patience)
    with pytest.raises(CollectiveTimeout, match=r"all_reduce: rank 1 waits for 0: timed out after 0\.\d s"):
        alone.all_reduce(torch.zeros(3))
    alone.close()


@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_rank_that_leaves_an_operation_out_is_found_before_anything_is_believed(segment_fd: int, forgetful: int) -> None:
    """Without the check rank 0 would gather what rank 1 had put there to be added up, and go on for ever."""

    def step(rank: int) -> str:
        ranks = open_collectives(GroupAddress("shm", segment_fd), rank, 2, NoProgress(), WaitPolicy(deadline_s=5))
        try:
            for _ in range(1 if rank == forgetful else 2):
                ranks.all_reduce(torch.ones(8))
            ranks.gather_to_root(torch.ones(8))
        except OutOfStep as error:
            return str(error)
        return "believed"

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(step, range(2)))
    assert all("is in a different operation than rank" in end for end in ends), ends


def test_waiting_gives_the_core_away(segment_fd: int) -> None:
    """A rank that waits for half a second spends little of it computing."""
    alone = open_collectives(GroupAddress("shm", segment_fd), 0, 2, NoProgress(), WaitPolicy(deadline_s=0.5))
    before = os.times()
    with pytest.raises(CollectiveTimeout):
        alone.all_reduce(torch.zeros(3))
    after = os.times()
    assert (after.user - before.user) + (after.system - before.system) < 0.25


def test_a_single_rank_needs_no_transport() -> None:
    group = open_collectives(GroupAddress("shm"), 0, 1, NoProgress())
    assert isinstance(group, LocalCollectives)
    x = torch.arange(3.0)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.gather_to_root(x) is x
    assert group.broadcast(x) is x


def test_an_unknown_backend_and_a_missing_store_are_named() -> None:
    with pytest.raises(ValueError, match="unknown collectives backend 'mpi'"):
        open_collectives(GroupAddress("mpi"), 0, 2, NoProgress())
    with pytest.raises(ValueError, match="gloo needs a store path"):
        open_collectives(GroupAddress("gloo"), 0, 2, NoProgress())


def test_gpus_use_nccl_and_cpus_shared_memory_where_stores_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_backend("cuda:1") == "nccl"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert default_backend("cpu") == "shm"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert default_backend("cpu") == "gloo"


def test_shared_memory_refuses_machines_without_store_order(segment_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(OSError, match="not aarch64: use gloo"):
        open_collectives(GroupAddress("shm", segment_fd), 0, 2, NoProgress())


def test_slots_fill_the_segment_without_overlap() -> None:
    for size in (1, 2, MAX_RANKS):
        offsets = sorted(slot_offset(rank, parity) for rank in range(size) for parity in (0, 1))
        steps = {later - earlier for earlier, later in zip(offsets, [*offsets[1:], segment_bytes(size)], strict=True)}
        assert len(steps) == 1
    with pytest.raises(ValueError, match="1 to 64 ranks, got 65"):
        segment_bytes(MAX_RANKS + 1)


def test_the_agents_half_of_the_package_imports_no_torch() -> None:
    rooms = {
        "collectives": ("opening", "parallel", "segment"),
        "checkpoints": ("tensor_files",),
        "architectures": ("registry",),
    }
    modules = ["refusal", *(f"{room}.{module}" for room, some in rooms.items() for module in some)]
    imports = "; ".join(f"import ryzanstein.worker.{module}" for module in modules)
    command = [sys.executable, "-c", f"{imports}; import sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, timeout=60, check=False, cwd=Path.cwd()).returncode == 0
