"""The command `ryzanstein bench machine`: bytes read and floating-point operations per second.

Both are measured, with the engine's own kernels where there are any: torch's read less than the
memory gives, and a share of what they read would flatter.

A step that must read a number of bytes cannot take less than bytes over bandwidth: the lower bound
that steps are compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.table import Table

from ryzanstein.lab.bench.engine.reference import MATMUL_SIZE, ReferenceKernel, matmul_kernel, num_cores, read_kernel
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine
from ryzanstein.process.allotment import available_memory_bytes
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.settings.options import RunnerOptions

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_LEAST_BYTES = 256 * 2**20
_MOST_BYTES = 2 * 2**30
_ROW = 4096
_READS = 3


class Ceilings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Medians of the rounds for one number of threads.

    `read_bytes_per_s` is over a buffer of `buffer_bytes`; if that is less than the caches
    (`cache_bytes`, 0: unknown), it is not the memory's bandwidth alone. `kernels` tells whose were
    measured: native or torch.
    """

    threads: int
    read_bytes_per_s: float
    matmul_flops_per_s: float
    buffer_bytes: int
    cache_bytes: int
    kernels: str = "torch"


def cache_bytes() -> int:
    """Returns the largest cache of the first core as Linux reports it.

    The source is sysfs-devices-system-cpu; 0 if it has no report.
    """
    sizes = [path.read_text().strip() for path in _CACHES.glob("index*/size")]
    return max((int(size[:-1]) * _UNITS[size[-1]] for size in sizes if size[-1:] in _UNITS), default=0)


def choose_buffer_bytes() -> int:
    """Returns twice the largest cache, within 256 MiB and 2 GiB.

    It is never more than a quarter of the free memory.
    """
    wanted = min(max(2 * cache_bytes(), _LEAST_BYTES), _MOST_BYTES)
    return min(wanted, available_memory_bytes() // 4)


def measure_ceilings(rounds: int, buffer_bytes: int) -> list[Ceilings]:
    """Measures with one thread and with all cores, interleaved round by round."""
    counts = sorted({1, num_cores()})
    native = open_kernels(RunnerOptions()).native
    read, matmul = _read_kernel(native, buffer_bytes), _matmul_kernel(native)
    kernels = {count: (replace(read, threads=count), replace(matmul, threads=count)) for count in counts}
    times: dict[int, list[tuple[float, ...]]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            times[count].append(tuple(map(ReferenceKernel.time, kernels[count])))
    whose = "torch" if native is None else "native"
    return [_ceilings(count, times[count], buffer_bytes, whose) for count in counts]


def _ceilings(threads: int, times: Sequence[tuple[float, ...]], buffer_bytes: int, kernels: str) -> Ceilings:
    read_s, matmul_s = map(statistics.median, zip(*times, strict=True))
    return Ceilings(threads, buffer_bytes / read_s, 2 * MATMUL_SIZE**3 / matmul_s, buffer_bytes, cache_bytes(), kernels)


def read_bytes_per_s(threads: int) -> float:
    """Returns the most bytes per second that `threads` read from memory in several runs."""
    buffer_bytes = choose_buffer_bytes()
    kernel = replace(_read_kernel(open_kernels(RunnerOptions()).native, buffer_bytes), threads=threads)
    return buffer_bytes / min(kernel.time() for _ in range(_READS))


def _read_kernel(native: NativeKernels | None, buffer_bytes: int) -> ReferenceKernel:
    """Returns a kernel that reads `buffer_bytes` once: a product of one row with a float32 weight."""
    if native is None:
        return read_kernel(buffer_bytes)
    num_outputs = max(1, buffer_bytes // (_ROW * torch.float32.itemsize))
    return _product(native, 1, num_outputs, _ROW)


def _matmul_kernel(native: NativeKernels | None) -> ReferenceKernel:
    """Returns a kernel of 2 * MATMUL_SIZE**3 floating-point operations."""
    return matmul_kernel() if native is None else _product(native, MATMUL_SIZE, MATMUL_SIZE, MATMUL_SIZE)


def _product(native: NativeKernels, num_rows: int, num_outputs: int, num_inputs: int) -> ReferenceKernel:
    """Returns a product with a packed weight of ones."""
    x_TI = torch.ones(num_rows, num_inputs)
    packed = torch.ones(native.floats.packed_bytes(num_outputs, num_inputs, torch.float32) // torch.float32.itemsize)
    work = f"own float32 product of {num_rows} x {num_inputs} by {num_inputs} x {num_outputs}"
    return ReferenceKernel(work, num_cores(), partial(native.floats.product, x_TI, packed, None, num_outputs))


def table(ceilings: Sequence[Ceilings]) -> Table:
    """Returns the table for people."""
    visible = Table(title="machine", title_justify="left")
    for heading in ("threads", "memory read", "float32 products", "buffer", "largest cache", "kernels"):
        visible.add_column(heading, justify="right")
    for row in ceilings:
        visible.add_row(
            str(row.threads),
            f"{row.read_bytes_per_s / 1e9:.1f} GB/s",
            f"{row.matmul_flops_per_s / 1e9:.0f} GFLOP/s",
            f"{row.buffer_bytes / 2**20:.0f} MiB",
            f"{row.cache_bytes / 2**20:.0f} MiB" if row.cache_bytes else "unknown",
            row.kernels,
        )
    return visible


def machine(
    *,
    rounds: Annotated[int, typer.Option(min=1, max=100)] = 9,
    buffer_mib: Annotated[int, typer.Option(min=0, max=16384, help="buffer to read; 0: twice the largest cache")] = 0,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Measure memory bandwidth and float32 products per second, with one thread and with all cores."""
    with refusals_as_exit():
        ceilings = measure_ceilings(rounds, buffer_mib * 2**20 or choose_buffer_bytes())
        document = {"machine": SuiteMachine.here(), "ceilings": ceilings}
        publish(msgspec.to_builtins(document), [table(ceilings)], json_path)
