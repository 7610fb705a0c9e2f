"""Products of float weights, in the layout that is fastest on the CPU.

Legend: T rows, I inputs, O outputs, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.native import NativeWeight, WeightKind

_COPIED_BYTES = 8 * 2**20


def float_product(weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels | None, *, kept: bool) -> Product:
    """Returns a product in the best layout (docs/internals/log/measurements.md has the times).

    `kept`: the weight stays in memory for another reader. If we have our own kernels, the weight is
    packed for them. Otherwise small weights are stored by inputs, and oneDNN blocks large ones. A
    large weight that is kept is not copied, or it would be in memory twice.
    """
    if kept and not copies_kept(weight_OI):
        return unpacked(weight_OI, bias_O, native)
    if native is not None:
        return Packed(weight_OI, bias_O, native, torch.float32)
    if weight_OI.nbytes < _COPIED_BYTES:
        return ByInputs(weight_OI, bias_O)
    return Blocked(weight_OI, bias_O) if _can_block(weight_OI) else ByOutputs(weight_OI, bias_O)


def unpacked(weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels | None) -> Product:
    """Returns a product with a weight that is not copied."""
    return ByOutputs(weight_OI, bias_O) if native is None else UnpackedWeight(weight_OI, bias_O, native)


def copies_kept(weight_OI: Tensor) -> bool:
    """Returns whether a product of a kept weight copies the weight."""
    return weight_OI.nbytes < _COPIED_BYTES


def _can_block(weight_OI: Tensor) -> bool:
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.float32
        and "onednn" in torch.backends.quantized.supported_engines
    )


class Packed:
    """A product with a weight packed for our own kernels, in float32 or float16.

    A row's result does not depend on the other rows.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels, dtype: torch.dtype) -> None:
        self._packed, self._bias_O = native.floats.pack(weight_OI, dtype), bias_O
        self._shape, self._multiply = (len(weight_OI), weight_OI.shape[1]), native.floats.product

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, self._packed, self._bias_O, self._shape[0])

    def native(self) -> list[NativeWeight]:
        kind: WeightKind = "halves" if self._packed.dtype == torch.float16 else "floats"
        return [NativeWeight(kind, self._packed, self._shape, self._bias_O)]


class UnpackedWeight:
    """A product of our own kernels with a weight in the checkpoint's layout.

    A row's result does not depend on the other rows.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels) -> None:
        self._weight_OI, self._bias_O, self._multiply = weight_OI, bias_O, native.floats.product_unpacked

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, self._weight_OI, self._bias_O)

    def native(self) -> list[NativeWeight]:
        num_outputs, num_inputs = self._weight_OI.shape
        return [NativeWeight("unpacked", self._weight_OI, (num_outputs, num_inputs), self._bias_O)]


class ByHead:
    """A product with a separate weight for each head: [T, H, I] to [T, H, O]."""

    def __init__(self, weight_HIO: Tensor, native: NativeKernels | None) -> None:
        self._functions, self._num_outputs = None if native is None else native.floats, weight_HIO.shape[2]
        if self._functions is None:
            self._weight_HIO = weight_HIO
        else:
            packed = [self._functions.pack(weight_IO.t(), torch.float32) for weight_IO in weight_HIO]
            self._weight_HIO = torch.stack(packed)

    def __call__(self, x_THI: Tensor) -> Tensor:
        x_HTI = x_THI.transpose(0, 1)
        if self._functions is None:
            return torch.bmm(x_HTI, self._weight_HIO).transpose(0, 1)
        return self._functions.product_by_head(x_HTI, self._weight_HIO, self._num_outputs).transpose(0, 1)


class ByInputs:
    """A product with a weight stored as [I, O]."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_IO, self._bias_O = weight_OI.t().contiguous(), bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._bias_O is None:
            return torch.mm(x_TI, self._weight_IO)
        return torch.addmm(self._bias_O, x_TI, self._weight_IO)


class ByOutputs:
    """A product with a weight in the checkpoint's layout, [O, I]: nothing is copied."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._bias_O = weight_OI, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)


class Blocked:
    """A product with a weight in oneDNN's own layout."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight, self._bias_O = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None), bias_O
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        product: Tensor = self._multiply(x_TI, self._weight, self._bias_O, "none", [], "")
        return product
