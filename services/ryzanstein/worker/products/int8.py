"""Products of 8-bit integers: a scale for each output and each row, exact 32-bit sums.

They work like LLM.int8() without outliers (Dettmers et al. 2022) and ZeroQuant's token-wise
activations (Yao et al. 2022). The integer sums are exact and the scales are applied in one order,
so a row's result does not depend on other rows, on threads or on the kernel: the choice of kernel
affects only speed.

Rows and weights are transformed in blocks of inputs before they are quantized (Hadamard, as in
QuaRot, Ashkboos et al. 2024): a number much larger than its neighbours, as trained models have
many, would leave few levels for the others. The transform is orthogonal, so that the product is the
same.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.native import NativeWeight, native_weights

_LEVELS = 127
_SMALLEST = torch.finfo(torch.float32).tiny
_EXACT_INPUTS = 2**24 // _LEVELS**2
_LARGEST_BLOCK, _SMALLEST_BLOCK = 128, 16
_ROWS_AT_ONCE = 1024  # of a weight, whose floats are copied


class Kernel(Protocol):
    """A product of rows [T, I] and a packed weight: [T, O] in float32, with all scales applied."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


class KernelType(Protocol):
    """A constructor that packs an int8 weight [O, I], levels of -127..127, with its scales [O].

    The weight was transformed in blocks of `block_of(I)`, and so must be the rows.
    """

    def __call__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> Kernel: ...


class NativeKernel:
    """Our own kernel, which also quantizes the rows."""

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        assert native is not None, "chosen where there is one"
        self._packed, self._scale_O, self._multiply = native.int8.pack(levels_OI), scale_O, native.int8.product
        self._shape = (len(levels_OI), levels_OI.shape[1])
        self._block = block_of(levels_OI.shape[1])

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, self._packed, self._scale_O, self._block)

    def native(self) -> list[NativeWeight]:
        return [NativeWeight("bytes", self._packed, self._shape, None, self._scale_O, self._block)]


class FbgemmKernel:
    """FBGEMM's kernel, which quantizes with one scale for all rows.

    With a scale of 1 it leaves whole numbers unchanged.
    """

    def __init__(self, levels_OI: Tensor, scale_O: Tensor, native: NativeKernels | None) -> None:
        zero_O = torch.zeros(len(scale_O), dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(levels_OI, scale_O, zero_O, 0)
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        self._quantize_rows = rows_quantizer(native, block_of(levels_OI.shape[1]))

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
        self._quantize_rows = rows_quantizer(native, block_of(levels_OI.shape[1]))

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
        self._quantize_rows = rows_quantizer(native, block_of(levels_OI.shape[1]))

    def __call__(self, x_TI: Tensor) -> Tensor:
        levels_TI, scale_T1 = self._quantize_rows(x_TI, torch.float32)
        sums_TO = torch.zeros(len(x_TI), len(self._scale_O), dtype=torch.float64)
        for rows_TI, weight_OI in zip(_of_inputs(levels_TI), self._parts, strict=True):
            sums_TO += rows_TI @ weight_OI.float().t()
        return sums_TO.float().mul_(self._scale_O).mul_(scale_T1)


def _of_inputs(levels: Tensor) -> list[Tensor]:
    return [levels[:, first : first + _EXACT_INPUTS] for first in range(0, levels.shape[1], _EXACT_INPUTS)]


class FillRows(Protocol):
    """A function that reads rows of a weight from number `first` on into `out_RI`, which holds zeros."""

    def __call__(self, first: int, out_RI: Tensor, /) -> None: ...


class RowsQuantizer(Protocol):
    """A function that returns whole numbers in -127..127, as `dtype`, and each row's scale [T, 1].

    Their product is approximately the transform of x. The scale of a row with a NaN or an infinity,
    and its results, are not finite.
    """

    def __call__(self, x_TI: Tensor, dtype: torch.dtype, /) -> tuple[Tensor, Tensor]: ...


def block_of(num_inputs: int) -> int:
    """Returns the size of the blocks in which inputs are transformed; 1: they are not.

    It is the largest power of two that divides the width, of at least 16 and at most 128.
    """
    block = min(num_inputs & -num_inputs, _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else 1


def rows_quantizer(native: NativeKernels | None, block: int) -> RowsQuantizer:
    """Returns a function that transforms and quantizes rows: our own, or torch's operators, which give the same bits."""
    transform: Callable[[Tensor, int], Tensor] = transform_rows if native is None else native.int8.transform_rows
    quantize: RowsQuantizer = quantize_rows if native is None else native.rows.quantize_rows
    return quantize if block == 1 else lambda x_TI, dtype: quantize(transform(x_TI, block), dtype)


def transform_rows(x_TI: Tensor, block: int) -> Tensor:
    """Returns the Hadamard transform of each block of each row, without its factor.

    The transform of a transform is the row again, times `block`.
    """
    whole_TI, half = x_TI, block // 2
    while half:
        one, other = whole_TI.reshape(len(x_TI), x_TI.shape[1] // (2 * half), 2, half).unbind(2)
        whole_TI, half = torch.stack((one + other, one - other), dim=2), half // 2
    return whole_TI.reshape(x_TI.shape)


def quantize_rows(x_TI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale_T1 = x_TI.abs().amax(dim=1, keepdim=True).div_(_LEVELS).clamp_min_(_SMALLEST)
    return (x_TI / scale_T1).round_().to(dtype), scale_T1


def quantize_weight(weight_OI: Tensor, native: NativeKernels | None) -> tuple[Tensor, Tensor]:
    """Returns the levels of a weight, transformed, [O, I] in int8, and the scales of the outputs, [O].

    The scales contain the factor of both transforms, a power of two.
    """
    block = block_of(weight_OI.shape[1])
    quantize = rows_quantizer(native, block)
    levels_OI, scale_O = torch.empty(weight_OI.shape, dtype=torch.int8), torch.empty(len(weight_OI))
    for first in range(0, len(weight_OI), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        levels_OI[some], scale_R1 = quantize(weight_OI[some], torch.int8)
        scale_O[some] = scale_R1.squeeze(1)
    return levels_OI, scale_O.div_(block)


class Int8Table:
    """A weight whose levels are multiplied, and looked up as well: an embedding that is also the head."""

    def __init__(self, packed: Tensor, scale_O: Tensor, num_inputs: int, native: NativeKernels) -> None:
        self._packed, self._scale_O, self._functions = packed, scale_O, native.int8
        self._num_inputs, self._block = num_inputs, block_of(num_inputs)
        self.device = packed.device

    @classmethod
    def read(cls, shape: tuple[int, int], fill: FillRows, native: NativeKernels) -> Int8Table:
        """Reads and quantizes some rows at a time, so that the floats are never in memory as a whole."""
        num_outputs, num_inputs = shape
        table = cls.empty(shape, native, torch.device("cpu"))
        row_bytes = native.int8.packed_bytes(_ROWS_AT_ONCE, num_inputs) // _ROWS_AT_ONCE
        weight_RI = torch.empty(min(_ROWS_AT_ONCE, num_outputs), num_inputs)
        for first in range(0, num_outputs, _ROWS_AT_ONCE):
            some_RI = weight_RI[: num_outputs - first].zero_()
            fill(first, some_RI)
            levels_RI, scale_R = quantize_weight(some_RI, native)
            packed = native.int8.pack(levels_RI)
            table._packed[first * row_bytes :][: len(packed)] = packed
            table._scale_O[first : first + len(scale_R)] = scale_R
        return table

    @classmethod
    def empty(cls, shape: tuple[int, int], native: NativeKernels, device: torch.device) -> Int8Table:
        """Returns a table without numbers; on the meta device it takes no memory."""
        packed = torch.empty(native.int8.packed_bytes(*shape), dtype=torch.uint8, device=device)
        return cls(packed, torch.empty(shape[0], device=device), shape[1], native)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scale_O.nbytes

    def lookup(self, index_T: Tensor) -> Tensor:
        """Returns rows of the weight in float32, [T, I]."""
        return self._functions.rows(self._packed, self._scale_O, index_T, self._num_inputs, self._block)

    def product(self, bias_O: Tensor | None) -> Int8Product:
        return Int8Product(self, bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Returns the product with all rows of the weight, without a bias."""
        return self._functions.product(x_TI, self._packed, self._scale_O, self._block)

    def native(self) -> list[NativeWeight]:
        return [NativeWeight("bytes", self._packed, (len(self._scale_O), self._num_inputs), None, self._scale_O, self._block)]


class Int8Product:
    """A product of rows, quantized in each call, and a weight quantized at load, plus the bias."""

    def __init__(self, kernel: Kernel, bias_O: Tensor | None) -> None:
        self._kernel, self._bias_O = kernel, bias_O

    @classmethod
    def of(
        cls, weight_OI: Tensor, bias_O: Tensor | None, kernel: KernelType, native: NativeKernels | None = None
    ) -> Int8Product:
        """Quantizes the weight."""
        return cls(kernel(*quantize_weight(weight_OI, native), native), bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        product_TO = self._kernel(x_TI)
        return product_TO if self._bias_O is None else product_TO.add_(self._bias_O)

    def native(self) -> Sequence[NativeWeight]:
        return [replace(weight, bias_O=self._bias_O) for weight in native_weights(self._kernel)]
