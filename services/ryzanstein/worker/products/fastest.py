"""Measures which 8-bit kernel is fastest on this machine, by shape and number of rows.

Each shape is measured once.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.int8 import (
    FbgemmKernel,
    FloatsKernel,
    Kernel,
    KernelType,
    NativeKernel,
    OneDnnKernel,
    transform_rows,
)

_ROWS = (1, 8, 16, 32, 64, 256)
_REPEATS = 5
_PROBE_INPUTS, _LARGEST = 64, 127
_SMALL, _SMALL_ROWS, _HOPELESS = (256, 256), (16,), 20
_MAX_OUTPUTS = 4096  # a part is enough to compare on
_TWICE_BYTES = 4 * 2**20  # weights up to this size may be kept in two packings


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A choice of kernels: `few` below `from_rows` rows, else `many`. They may be the same."""

    few: KernelType
    many: KernelType
    from_rows: int = 0

    @property
    def kinds(self) -> tuple[KernelType, ...]:
        """The kernel types, one for each packing that is kept."""
        return (self.few,) if self.few is self.many else (self.few, self.many)

    def of_rows(self, num_rows: int) -> KernelType:
        return self.few if num_rows < self.from_rows else self.many


class FastestKernels:
    """A selection that minimizes, for each shape, the product of times over several row counts."""

    def __init__(self, native: NativeKernels | None) -> None:
        self._native, self._types = native, worthwhile(exact_kernels(native), native)
        self._fastest = cache(self._measure)

    def of_shape(self, num_outputs: int, num_inputs: int) -> KernelChoice:
        """Returns the choice for a shape.

        The first call for a shape measures: nothing else should compute then.
        """
        if len(self._types) == 1:
            return KernelChoice(self._types[0], self._types[0])
        return self._fastest(num_outputs, num_inputs)

    def _measure(self, num_outputs: int, num_inputs: int) -> KernelChoice:
        shape = min(num_outputs, _MAX_OUTPUTS), num_inputs
        log_times = {
            kind: [math.log(seconds) for seconds in _seconds(kind, shape, _ROWS, self._native)] for kind in self._types
        }

        def cost(choice: KernelChoice) -> float:
            return sum(log_times[choice.of_rows(rows)][index] for index, rows in enumerate(_ROWS))

        return min(_choices(self._types, twice=num_outputs * num_inputs <= _TWICE_BYTES), key=cost)


def exact_kernels(native: NativeKernels | None) -> list[KernelType]:
    """Returns the exact kernels: our own or else FBGEMM's, and oneDNN's.

    If none of them is exact, the result is the kernel that multiplies floats.
    """
    engines = torch.backends.quantized.supported_engines
    types: list[KernelType] = []
    if native is not None:
        types.append(NativeKernel)
    elif "fbgemm" in engines:
        types.append(FbgemmKernel)
    if "onednn" in engines:
        types.append(OneDnnKernel)
    return [kind for kind in types if _is_exact(kind, native)] or [FloatsKernel]


def _is_exact(kind: KernelType, native: NativeKernels | None) -> bool:
    """Returns whether a kernel's sums are exact.

    Without VNNI, torch's kernels add products in 16 bits, which the largest products overflow.
    torch's one warning, at its first tensor for FBGEMM, that a later torch drops them is
    suppressed.
    """
    levels_TI = torch.full((1, _PROBE_INPUTS), _LARGEST, dtype=torch.int8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        kernel = kind(levels_TI, torch.ones(1), native)
    x_TI = transform_rows(levels_TI.float(), _PROBE_INPUTS) / _PROBE_INPUTS  # what the transform makes these levels of
    return kernel(x_TI).item() == _PROBE_INPUTS * _LARGEST**2


def worthwhile(types: list[KernelType], native: NativeKernels | None) -> list[KernelType]:
    """Returns the types without those that are hopelessly slow for a small product.

    oneDNN uses a plain loop if it has no kernel for the CPU. That is thousands of times slower, and
    measuring every shape with it would take minutes.
    """
    if len(types) == 1:
        return types
    times = [_seconds(kind, _SMALL, _SMALL_ROWS, native)[0] for kind in types]
    return [kind for kind, seconds in zip(types, times, strict=True) if seconds < _HOPELESS * min(times)]


def _choices(types: Sequence[KernelType], *, twice: bool) -> list[KernelChoice]:
    once = [KernelChoice(kind, kind) for kind in types]
    if not twice:
        return once
    return once + [KernelChoice(few, many, rows) for few, many in permutations(types, 2) for rows in _ROWS[1:]]


def _seconds(kind: KernelType, shape: tuple[int, int], rows: Sequence[int], native: NativeKernels | None) -> list[float]:
    """Returns the seconds that a product of that shape takes, for each number of rows."""
    num_outputs, num_inputs = shape
    kernel = kind(torch.ones(shape, dtype=torch.int8), torch.ones(num_outputs), native)
    return [_least_seconds(kernel, torch.ones(count, num_inputs)) for count in rows]


def _least_seconds(kernel: Kernel, x_TI: torch.Tensor) -> float:
    """Returns the shortest time of several calls, after one that is not counted."""
    kernel(x_TI)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        kernel(x_TI)
        times.append(time.perf_counter() - began)
    return min(times)
