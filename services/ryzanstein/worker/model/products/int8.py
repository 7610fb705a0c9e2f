"""Products of 8-bit integers: a scale for each output and each row, exact 32-bit sums.

They work like LLM.int8() without outliers (Dettmers et al. 2022) and ZeroQuant's token-wise
activations (Yao et al. 2022). The integer sums are exact and the scales are applied in one order,
so a row's result does not depend on other rows, on threads or on the kernel: the choice of kernel
affects only speed.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels

_LEVELS = 127
_SMALLEST = torch.finfo(torch.float32).tiny
_EXACT_INPUTS = 2**24 // _LEVELS**2


class Kernel(Protocol):
    """A product of rows [T, I] and a packed weight: [T, O] in float32, with all scales applied."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class KernelType(Protocol):
    """A constructor that packs an int8 weight [O, I], levels of -127..127, with its scales [O]."""

    def __call__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> Kernel: ...


class NativeKernel:
    """Our own kernel, which also quantizes the rows."""

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        assert native is not None, "chosen where there is one"
        self._packed, self._scale_O, self._multiply = native.int8_pack(levels_OI), scale_O, native.int8_product

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, self._packed, self._scale_O)


class FbgemmKernel:
    """FBGEMM's kernel, which quantizes with one scale for all rows.

    With a scale of 1 it leaves whole numbers unchanged.
    """

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(levels_OI, scale_O, zero_O, 0)
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._quantize_rows = rows_quantizer(native)

    def __call__(self, x_TI: Tensor) -> Tensor:
        levels_TI, scale_T1 = self._quantize_rows(x_TI, torch.float32)
        product_TO: Tensor = self._multiply(levels_TI, 1.0, _LEVELS + 1, self._packed)
        return product_TO.mul_(scale_T1)


class OneDnnKernel:
    """oneDNN's kernel, which uses AMX if the CPU has it."""

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(levels_OI, None)
        self._scale_O, self._zero_O = scale_O, torch.zeros(len(scale_O), dtype=torch.int32)
        self._multiply = torch.ops.onednn.qlinear_pointwise.default
        self._quantize_rows = rows_quantizer(native)

    def __call__(self, x_TI: Tensor) -> Tensor:
        levels_TI, scale_T1 = self._quantize_rows(x_TI, torch.int8)
        weight = (self._packed, self._scale_O, self._zero_O)
        product_TO: Tensor = self._multiply(levels_TI, 1.0, 0, *weight, None, 1.0, 0, torch.float32, "none", [], "")
        return product_TO.mul_(scale_T1)


class FloatsKernel:
    """A kernel that multiplies whole numbers in float32, whose sums are exact up to 2**24.

    The inputs are divided into parts that stay below that. It runs on every CPU and is slow: each
    product converts the weight to floats again.
    """

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        self._parts, self._scale_O = _of_inputs(levels_OI), scale_O
        self._quantize_rows = rows_quantizer(native)

    def __call__(self, x_TI: Tensor) -> Tensor:
        levels_TI, scale_T1 = self._quantize_rows(x_TI, torch.float32)
        sums_TO = torch.zeros(len(x_TI), len(self._scale_O), dtype=torch.float64)
        for rows_TI, weight_OI in zip(_of_inputs(levels_TI), self._parts, strict=True):
            sums_TO += rows_TI @ weight_OI.float().t()
        return sums_TO.float().mul_(self._scale_O).mul_(scale_T1)


def _of_inputs(levels: Tensor) -> list[Tensor]:
    return [levels[:, first : first + _EXACT_INPUTS] for first in range(0, levels.shape[1], _EXACT_INPUTS)]


class RowsQuantizer(Protocol):
    """A function that returns whole numbers in -127..127, as `dtype`, and each row's scale [T, 1].

    Their product is approximately x. The scale of a row with a NaN or an infinity, and its
    results, are not finite.
    """

    def __call__(self, x_TI: Tensor, dtype: torch.dtype, /) -> tuple[Tensor, Tensor]: ...


def rows_quantizer(native: NativeKernels | None) -> RowsQuantizer:
    """Returns our own quantizer, one call, or torch's operators, which give the same bits."""
    return quantize_rows if native is None else native.quantize_rows


def quantize_rows(x_TI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale_T1 = x_TI.abs().amax(dim=1, keepdim=True).div_(_LEVELS).clamp_min_(_SMALLEST)
    return (x_TI / scale_T1).round_().to(dtype), scale_T1


class Int8Product:
    """A product of rows, quantized in each call, and a weight quantized at load, plus the bias."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, kernel: KernelType, native: NativeKernels | None = None
    ) -> None:
        levels_OI, scale_O1 = rows_quantizer(native)(weight_OI, torch.int8)
        self._kernel, self._bias_O = kernel(levels_OI, scale_O1.squeeze(1), native), bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        product_TO = self._kernel(x_TI)
        return product_TO if self._bias_O is None else product_TO.add_(self._bias_O)
