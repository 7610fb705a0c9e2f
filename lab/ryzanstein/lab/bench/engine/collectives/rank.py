"""The program of the collectives benchmark's ranks, with a fork server.

Run it as `python -P -m ryzanstein.lab.bench.engine.collectives.rank`. It starts as a node's rank does
(inherited segment, store and board, threads, separate cores), has no model, and times one
collective after another as requested.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Never

import torch
from torch import Tensor

from ryzanstein.lab.bench.engine.collectives.messages import BenchmarkMessage, CollectiveRan, CollectiveReady, RunCollective
from ryzanstein.worker.collectives import Collectives
from ryzanstein.worker.collectives.opening import GroupAddress, open_collectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.collectives.waiting import WaitPolicy
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.ranks.channel import ChannelClosed, RankChannel
from ryzanstein.worker.ranks.health.board import RankBoard
from ryzanstein.worker.ranks.messages import RankCrashed, StartRank
from ryzanstein.worker.ranks.starting import fork_server
from ryzanstein.worker.ranks.starting.startup import cores
from ryzanstein.worker.settings.options import RunnerOptions

_DEADLINE_S = 60.0
_PERIOD = 251  # a prime: swapped parts and chunks do not look alike


class WrongResult(Exception):
    """A collective gave a wrong result; the message names it, its size and the rank."""


class CollectiveProbe:
    """Runs collectives on operands that it creates."""

    def __init__(self, tp: TensorParallel, device: torch.device) -> None:
        self._tp = tp
        self._device = device
        self._aligned_1 = torch.zeros(1, device=device)

    def verify(self, op: str, num_elements: int) -> None:
        """Runs a collective and checks its result. Raises WrongResult.

        The operands are small integers, so the sum is exact in float32 in any order.
        """
        pattern_N = (torch.arange(num_elements, device=self._device) % _PERIOD).float()
        result_N = _run(self._tp.collectives, op, self._operand(op, pattern_N + self._tp.rank))
        expected_N = self._expected(op, pattern_N)
        if not torch.equal(result_N, expected_N):
            wrong = int((result_N != expected_N).sum()) if result_N.shape == expected_N.shape else num_elements
            raise WrongResult(f"{op} of {num_elements} elements: {wrong} are wrong on rank {self._tp.rank}")

    def time(self, op: str, num_elements: int, iterations: int) -> CollectiveRan:
        """Times each run from when all ranks are there.

        Otherwise a root that need not wait would run ahead of the others.
        """
        operand_N = self._operand(op, torch.zeros(num_elements, device=self._device))  # zeros: repeated sums stay zero
        begun_ns, ended_ns = [], []
        for _ in range(iterations):
            self._tp.collectives.all_reduce(self._aligned_1)
            self._synchronize()
            begun_ns.append(time.monotonic_ns())
            _run(self._tp.collectives, op, operand_N)
            self._synchronize()
            ended_ns.append(time.monotonic_ns())
        return CollectiveRan(self._tp.rank, begun_ns, ended_ns)

    def _operand(self, op: str, x_N: Tensor) -> Tensor:
        """Returns this rank's operand: of a gather only its part."""
        return x_N.tensor_split(self._tp.size)[self._tp.rank].clone() if op == "all_gather" else x_N

    def _expected(self, op: str, pattern_N: Tensor) -> Tensor:
        """Returns what every rank must hold if rank r contributes the pattern plus r."""
        size = self._tp.size
        if op == "all_reduce":
            return size * pattern_N + size * (size - 1) // 2
        if op == "all_gather":
            return torch.cat([part_N + rank for rank, part_N in enumerate(pattern_N.tensor_split(size))])
        return pattern_N

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _run(collectives: Collectives, op: str, x_N: Tensor) -> Tensor:
    match op:
        case "all_reduce":
            return collectives.all_reduce(x_N)
        case "all_gather":
            return collectives.all_gather(x_N)
        case "broadcast":
            return collectives.broadcast(x_N)
    raise ValueError(f"unknown collective {op!r}")


def run(rank: int, fd: int) -> int:
    """Runs a rank in its own process. Returns the exit code."""
    channel: RankChannel[BenchmarkMessage] = RankChannel(socket.socket(fileno=fd), BenchmarkMessage)
    try:
        (start,) = channel.wait()
        assert isinstance(start, StartRank)
        _serve(channel, start)
    except ChannelClosed:
        return 0
    except Exception as error:
        channel.send(RankCrashed(rank, f"{type(error).__name__}: {error}"[:1024]))
        return 1


def _serve(channel: RankChannel[BenchmarkMessage], start: StartRank) -> Never:
    probe = _open_probe(start)
    channel.send(CollectiveReady(start.rank))
    while True:
        for request in channel.wait():
            assert isinstance(request, RunCollective)
            channel.send(_obey(probe, request))


@torch.inference_mode()
def _obey(probe: CollectiveProbe, request: RunCollective) -> CollectiveRan:
    if request.verify:
        probe.verify(request.op, request.num_elements)
    return probe.time(request.op, request.num_elements, request.iterations)


def _open_probe(start: StartRank) -> CollectiveProbe:
    spec = start.spec
    if spec.pin:
        os.sched_setaffinity(0, cores(sorted(os.sched_getaffinity(0)), start.rank, spec.threads))
    torch.set_num_threads(spec.threads)
    device = torch.device("cuda", start.rank) if spec.collectives == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    address = GroupAddress(spec.collectives, start.segment_fd, Path(f"/proc/self/fd/{start.store_fd}"))
    board = RankBoard(start.board_fd, spec.tp, start.rank)
    group = open_collectives(address, start.rank, spec.tp, board, WaitPolicy(deadline_s=_DEADLINE_S))
    native = open_kernels(RunnerOptions(device=device.type, compiles_kernels=False)).native
    group.use(None if native is None else native.meeting)
    return CollectiveProbe(TensorParallel(start.rank, spec.tp, group), device)


if __name__ == "__main__":
    sys.exit(fork_server.main(lambda: None, run))
