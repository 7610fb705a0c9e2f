"""Which 8-bit kernels multiply a weight of some shape fastest on this machine, by the number of rows: measured once a shape.

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

from ryzanstein.worker.model.products.int8 import FbgemmKernel, Kernel, KernelType, OneDnnKernel
from ryzanstein.worker.model.refusal import ModelRefused

_ROWS = (1, 8, 16, 32, 64, 256)
_REPEATS = 5
_PROBE_INPUTS, _LARGEST = 64, 127
_MAX_OUTPUTS = 4096  # a part is enough to compare on
_TWICE_BYTES = 4 * 2**20  # weights up to here may be kept in two packings


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """`few` multiplies less than `from_rows` rows, `many` the others. They may be one."""

    few: KernelType
    many: KernelType
    from_rows: int = 0

    @property
    def kinds(self) -> tuple[KernelType, ...]:
        """One for each packing that is kept."""
        return (self.few,) if self.few is self.many else (self.few, self.many)

    def of_rows(self, num_rows: int) -> KernelType:
        return self.few if num_rows < self.from_rows else self.many


class FastestKernels:
    """For each shape the choice with the least product of times over some row counts."""

    def __init__(self) -> None:
        self._types = available_kernels()
        self._fastest = cache(self._measure)

    def of_shape(self, num_outputs: int, num_inputs: int) -> KernelChoice:
        """Measures when it sees the shape for the first time: nothing else should compute then."""
        if len(self._types) == 1:
            return KernelChoice(self._types[0], self._types[0])
        return self._fastest(num_outputs, num_inputs)

    def _measure(self, num_outputs: int, num_inputs: int) -> KernelChoice:
        log_times = {kind: _log_times(kind, min(num_outputs, _MAX_OUTPUTS), num_inputs) for kind in self._types}

        def cost(choice: KernelChoice) -> float:
            return sum(log_times[choice.of_rows(rows)][index] for index, rows in enumerate(_ROWS))

        return min(_choices(self._types, twice=num_outputs * num_inputs <= _TWICE_BYTES), key=cost)


def available_kernels() -> list[KernelType]:
    """Raises ModelRefused where this torch or CPU has none that is exact."""
    engines = torch.backends.quantized.supported_engines
    types: list[KernelType] = []
    if "fbgemm" in engines:
        types.append(FbgemmKernel)
    if "onednn" in engines:
        types.append(OneDnnKernel)
    exact = [kind for kind in types if _is_exact(kind)]
    if not exact:
        raise ModelRefused(f"quantization int8: this torch and CPU have no exact kernels, only {', '.join(engines)}")
    return exact


def _is_exact(kind: KernelType) -> bool:
    """Without VNNI, kernels add products in 16 bits, which the largest ones overflow.

    torch warns once, at its first tensor for FBGEMM, that a later torch will not have them: nothing for a log of ours.
    """
    levels_TI = torch.full((1, _PROBE_INPUTS), _LARGEST, dtype=torch.int8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        kernel = kind(levels_TI, torch.ones(1))
    return kernel(levels_TI.to(kernel.dtype)).item() == _PROBE_INPUTS * _LARGEST**2


def _choices(types: Sequence[KernelType], *, twice: bool) -> list[KernelChoice]:
    once = [KernelChoice(kind, kind) for kind in types]
    if not twice:
        return once
    return once + [KernelChoice(few, many, rows) for few, many in permutations(types, 2) for rows in _ROWS[1:]]


def _log_times(kind: KernelType, num_outputs: int, num_inputs: int) -> list[float]:
    kernel = kind(torch.ones((num_outputs, num_inputs), dtype=torch.int8), torch.ones(num_outputs))
    return [math.log(_seconds(kernel, torch.ones(rows, num_inputs, dtype=kernel.dtype))) for rows in _ROWS]


def _seconds(kernel: Kernel, levels_TI: torch.Tensor) -> float:
    """The least of some calls, after one that is not counted."""
    kernel(levels_TI)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        kernel(levels_TI)
        times.append(time.perf_counter() - began)
    return min(times)
