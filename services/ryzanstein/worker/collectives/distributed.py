"""Collectives of torch.distributed: NCCL between GPUs, gloo as the portable backend for processes.

Process groups are created directly from a store, not by `init_process_group`, whose group is a
global of the process.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ryzanstein.worker.collectives import CannotRejoin, CollectiveProgress, CollectiveTimeout
from ryzanstein.worker.collectives.meeting import NativeMeeting


class DistributedCollectives:
    """One rank's end of a torch backend.

    The group's type is Any: torch's stubs lack the operations of its backends.
    """

    meeting = None

    def __init__(self, group: Any, rank: int, size: int, progress: CollectiveProgress, *, sums_in_order: bool = False) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._progress, self._sums_in_order = progress, sums_in_order

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._sums_in_order:
            return self._sum_in_order(x)
        self._wait("all_reduce", x, self._group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._wait("all_gather", x, self._group.allgather([parts], [x]))
        return torch.cat(parts, dim)

    def gather_to_root(self, x: Tensor, dim: int = -1) -> Tensor | None:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        self._wait("gather_to_root", x, self._group.gather([parts] if parts else [], [x], dist.GatherOptions()))
        return torch.cat(parts, dim) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        self._wait("broadcast", x, self._group.broadcast([x], dist.BroadcastOptions()))
        return x

    def _sum_in_order(self, x: Tensor) -> Tensor:
        """Sums `x` over all ranks in rank order.

        gloo's ring sums each part of a message in another order, so that a row's result would
        depend on the batch.
        """
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._wait("all_reduce", x, self._group.allgather([parts], [x]))
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x.add_(part)
        return x

    def rejoin(self) -> None:
        raise CannotRejoin("an aborted step leaves torch's process group unusable")

    def use(self, native: NativeMeeting | None) -> None:
        pass

    def close(self) -> None:
        self._group.shutdown()

    def _wait(self, op: str, x: Tensor, work: dist.Work) -> None:
        self._progress.begin(op, x.nbytes)
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveTimeout(f"{op}: rank {self._rank}: {error}") from error
        self._progress.end()


def gloo_collectives(
    store_path: Path, rank: int, size: int, progress: CollectiveProgress, deadline_s: float
) -> DistributedCollectives:
    """Joins a gloo group whose ranks meet at the file `store_path`.

    With two ranks every order of summation gives the same result.
    """
    group = dist.ProcessGroupGloo(_meet(store_path, rank, size), rank, size, timedelta(seconds=deadline_s))
    return DistributedCollectives(group, rank, size, progress, sums_in_order=size > 2)


def nccl_collectives(
    store_path: Path, rank: int, size: int, progress: CollectiveProgress, deadline_s: float
) -> DistributedCollectives:
    """Joins an NCCL group whose ranks meet at the file `store_path`.

    The rank uses the current CUDA device.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    group = dist.ProcessGroupNCCL(_meet(store_path, rank, size), rank, size, options)
    return DistributedCollectives(group, rank, size, progress)


def _meet(store_path: Path, rank: int, size: int) -> Any:
    store, _, _ = next(rendezvous(f"file://{store_path}", rank, size))
    return store
