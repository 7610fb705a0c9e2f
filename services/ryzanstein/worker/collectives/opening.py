"""Chooses and opens the backend that a rank is configured to use."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.worker.collectives import CollectiveProgress, Collectives
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.waiting import WaitPolicy


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """The address at which the ranks of one group meet.

    `backend` is shm, gloo or nccl. shm needs `segment_fd`, a zeroed segment of
    `segment_bytes(size)` bytes. The other two need `store_path`, a file that all ranks can access
    and that is empty or does not exist yet.
    """

    backend: str
    segment_fd: int = -1
    store_path: Path | None = None


def default_backend(device: str) -> str:
    """Returns nccl for GPUs; for CPUs shm if the machine has the store order for it, else gloo."""
    if device.startswith("cuda"):
        return "nccl"
    return "shm" if platform.machine() in {"x86_64", "AMD64"} else "gloo"


def open_collectives(
    address: GroupAddress, rank: int, size: int, progress: CollectiveProgress, patience: WaitPolicy | None = None
) -> Collectives:
    """Joins the group; a single rank needs none.

    Raises ValueError for an unknown backend or an incomplete address.
    """
    patience = patience or WaitPolicy()
    if size == 1:
        return LocalCollectives(progress.address)
    if address.backend == "shm":
        from ryzanstein.worker.collectives.shm import ShmCollectives

        return ShmCollectives(address.segment_fd, rank, size, progress, patience)
    return _open_distributed(address, rank, size, progress, patience)


def _open_distributed(
    address: GroupAddress, rank: int, size: int, progress: CollectiveProgress, patience: WaitPolicy
) -> Collectives:
    from ryzanstein.worker.collectives.distributed import gloo_collectives, nccl_collectives

    openers = {"gloo": gloo_collectives, "nccl": nccl_collectives}
    if address.backend not in openers:
        raise ValueError(f"unknown collectives backend {address.backend!r}: must be shm, gloo or nccl")
    if address.store_path is None:
        raise ValueError(f"{address.backend} needs a store path")
    return openers[address.backend](address.store_path, rank, size, progress, patience.deadline_s)
