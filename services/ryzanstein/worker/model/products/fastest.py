"""Which of the 8-bit kernels multiplies a weight of some shape fastest on this machine: measured once for each shape.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import torch

from ryzanstein.worker.model.products.int8 import FbgemmKernel, Kernel, KernelType, OneDnnKernel
from ryzanstein.worker.model.refusal import ModelRefused

_ROWS = (1, 8, 32, 256)
_REPEATS = 5
_MAX_OUTPUTS = 4096  # a part is enough to compare on


class FastestKernel:
    """Kernels of weights, each of the type that was fastest for its shape: the least product of times over some row counts."""

    def __init__(self) -> None:
        self._types = _available()
        self._fastest = cache(self._measure)

    def of_shape(self, num_outputs: int, num_inputs: int) -> KernelType:
        """Measures when it sees the shape for the first time."""
        if len(self._types) == 1:
            return self._types[0]
        return self._fastest(min(num_outputs, _MAX_OUTPUTS), num_inputs)

    def _measure(self, num_outputs: int, num_inputs: int) -> KernelType:
        levels_OI = torch.ones((num_outputs, num_inputs), dtype=torch.int8)
        scale_O = torch.ones(num_outputs)
        return min(self._types, key=lambda kind: _log_time(kind(levels_OI, scale_O), num_inputs))


def _available() -> list[KernelType]:
    """Raises ModelRefused where this torch or CPU has none."""
    types: list[KernelType] = []
    if "fbgemm" in torch.backends.quantized.supported_engines:
        types.append(FbgemmKernel)
    if "onednn" in torch.backends.quantized.supported_engines:
        types.append(OneDnnKernel)
    if not types:
        raise ModelRefused("quantization int8: this torch has neither FBGEMM nor oneDNN kernels")
    return types


def _log_time(kernel: Kernel, num_inputs: int) -> float:
    inputs = [torch.ones(rows, num_inputs) for rows in _ROWS]
    return sum(math.log(_seconds(lambda x=x: kernel(x))) for x in inputs)  # type: ignore[misc]


def _seconds(call: Callable[[], object]) -> float:
    """The least of some calls, after one that is not counted."""
    call()
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
