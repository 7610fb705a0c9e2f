"""Reference kernels: small fixed pieces of work that show how fast the machine is at the moment.

They are timed next to the work of a benchmark. A figure divided by the time of the kernel next to
it does not change when the whole machine slows down (Bulej et al., Duet Benchmarking, ICPE 2020,
run two programs side by side for the same reason). The module knows nothing about models, ranks or
files.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ryzanstein.process.allotment import whole_cores

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
    """A kernel. `work` describes what it does, with its sizes."""

    work: str
    threads: int
    run: Callable[[], object]

    @property
    def definition(self) -> str:
        """Returns the definition. Times of kernels with different definitions do not compare."""
        return f"{self.work}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def time(self) -> float:
        """Returns the seconds of one run: the median of those that fit into 40 ms, at least three.

        One run comes first and is not counted.
        """
        samples: list[float] = []
        with _threads(self.threads), torch.inference_mode():
            self.run()
            while len(samples) < _LEAST_SAMPLES or (sum(samples) < _ENOUGH_S and len(samples) < _MOST_SAMPLES):
                samples.append(_seconds(self.run))
        return statistics.median(samples)


class References:
    """The kernels by name.

    They hold their operands, including a buffer larger than the caches, as long as they live.
    """

    def __init__(self, kernels: Mapping[str, ReferenceKernel]) -> None:
        self._kernels = kernels

    @classmethod
    def build(cls, buffer_bytes: int) -> References:
        """Builds all kernels. `buffer_bytes` is what is read.

        `matmul` is bound by arithmetic, `read` by memory, `small` by operators and the joining of
        threads, each with all cores of this process; `loop` by Python and `read-1` by memory, with
        one thread.
        """
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
        """Returns the seconds of one run of each."""
        return {name: self._kernels[name].time() for name in names}


def num_cores() -> int:
    """Returns how many threads this process may keep busy."""
    return whole_cores()


def matmul_kernel() -> ReferenceKernel:
    """Returns a kernel of 2 * MATMUL_SIZE**3 floating-point operations."""
    left_NN, right_NN = torch.rand(2, MATMUL_SIZE, MATMUL_SIZE).unbind()
    work = f"float32 product of {MATMUL_SIZE} x {MATMUL_SIZE} by {MATMUL_SIZE} x {MATMUL_SIZE}"
    return ReferenceKernel(work, num_cores(), partial(torch.mm, left_NN, right_NN))


def read_kernel(buffer_bytes: int) -> ReferenceKernel:
    """Returns a kernel that reads `buffer_bytes` once, as a decode step reads its weights.

    The bytes are rounded down to rows of 16 KiB, at least one.
    """
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
    """Sets torch's number of threads while in the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
