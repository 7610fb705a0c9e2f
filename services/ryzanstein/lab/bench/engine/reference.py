"""Reference kernels: small fixed pieces of work that tell how fast the machine is just now.

They are timed beside what a benchmark is about: a figure divided by the time of the kernel beside it does not change when the
whole machine slows down (Bulej et al., Duet Benchmarking, ICPE 2020, run two programs side by side for the same reason). Knows
nothing of models, ranks or files.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

MATMUL_SIZE = 1024
SMALL_SHAPE = (32, 288, 768)  # rows, inputs, outputs: a product of a decode step of the S preset
_SMALL_CALLS = 20
_LOOP_TURNS = 20_000
_ENOUGH_S = 0.04
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 100
_FLOAT_BYTES = 4
_ROW = 4096


@dataclass(frozen=True, slots=True)
class ReferenceKernel:
    """`work` says what is done, with its sizes."""

    work: str
    threads: int
    run: Callable[[], object]

    @property
    def definition(self) -> str:
        """Times of kernels that differ in it do not compare."""
        return f"{self.work}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def time(self) -> float:
        """Seconds of one run: the median of those that fit into 40 ms, at least three, after one that is not counted."""
        samples: list[float] = []
        with _threads(self.threads), torch.inference_mode():
            self.run()
            while len(samples) < _LEAST_SAMPLES or (sum(samples) < _ENOUGH_S and len(samples) < _MOST_SAMPLES):
                samples.append(_seconds(self.run))
        return statistics.median(samples)


class References:
    """The kernels by name. They hold their operands, a buffer larger than the caches among them, as long as they live."""

    def __init__(self, kernels: Mapping[str, ReferenceKernel]) -> None:
        self._kernels = kernels

    @classmethod
    def build(cls, buffer_bytes: int) -> References:
        """`matmul` is bound by arithmetic, `read` by memory, `small` by operators and the joining of threads, each with all
        cores of this process; `loop` by Python and `read-1` by memory, with one thread. `buffer_bytes` is what is read."""
        read = read_kernel(buffer_bytes)
        return cls(
            {
                "matmul": matmul_kernel(),
                "read": read,
                "read-1": replace(read, threads=1),
                "small": _small_kernel(),
                "loop": ReferenceKernel(f"{_LOOP_TURNS} turns of a Python loop over a list and a dict", 1, _loop),
            }
        )

    @property
    def definitions(self) -> dict[str, str]:
        return {name: kernel.definition for name, kernel in self._kernels.items()}

    def time(self, names: Iterable[str]) -> dict[str, float]:
        """Seconds of one run of each."""
        return {name: self._kernels[name].time() for name in names}


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0))


def matmul_kernel() -> ReferenceKernel:
    """2 * MATMUL_SIZE**3 floating-point operations."""
    left_NN, right_NN = torch.rand(2, MATMUL_SIZE, MATMUL_SIZE).unbind()
    work = f"float32 product of {MATMUL_SIZE} x {MATMUL_SIZE} by {MATMUL_SIZE} x {MATMUL_SIZE}"
    return ReferenceKernel(work, num_cores(), partial(torch.mm, left_NN, right_NN))


def read_kernel(buffer_bytes: int) -> ReferenceKernel:
    """Reads `buffer_bytes` (rounded down to rows of 16 KiB, at least one) once, as a decode step reads its weights."""
    rows = max(1, buffer_bytes // (_ROW * _FLOAT_BYTES))
    matrix_RN, vector_N = torch.ones(rows, _ROW), torch.ones(_ROW)
    work = f"float32 product of {rows} x {_ROW} by a vector"
    return ReferenceKernel(work, num_cores(), partial(torch.mv, matrix_RN, vector_N))


def _small_kernel() -> ReferenceKernel:
    rows, inputs, outputs = SMALL_SHAPE
    x_RI, weight_IO = torch.rand(rows, inputs), torch.rand(inputs, outputs)
    work = f"{_SMALL_CALLS} float32 products of {rows} x {inputs} by {inputs} x {outputs}"
    return ReferenceKernel(work, num_cores(), partial(_small, x_RI, weight_IO))


def _small(x_RI: Tensor, weight_IO: Tensor) -> None:
    for _ in range(_SMALL_CALLS):
        torch.mm(x_RI, weight_IO)


def _loop() -> int:
    counts: dict[int, int] = {}
    values: list[int] = []
    for turn in range(_LOOP_TURNS):
        counts[turn & 63] = counts.get(turn & 63, 0) + turn
        values.append(turn)
    return len(values) + len(counts)


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """torch's number of threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
