"""Products of float32 rows with 16-bit weights: half the memory to read, sums in float32.

Our own kernel is used if there is one, else FBGEMM's. With either, a row's result does not depend
on the other rows. Weights that a checkpoint stores in bfloat16 or float16 lose nothing if their
absolute value is between 2^-14 and 65504; smaller ones are rounded to a multiple of 2^-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.floats import Packed
from ryzanstein.worker.refusal import BeyondHalf

_LARGEST = torch.finfo(torch.float16).max


def half_product(weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels | None) -> Product:
    """Returns a product with a 16-bit weight. Raises BeyondHalf if float16 cannot hold it."""
    least, most = (float(bound) for bound in weight_OI.aminmax())
    largest = max(-least, most)
    if not largest <= _LARGEST:
        raise BeyondHalf(f"quantization fp16: a weight of {largest} exceeds the float16 maximum of {_LARGEST}")
    if native is not None:
        return Packed(weight_OI, bias_O, native, torch.float16)
    return FbgemmHalfProduct(weight_OI, bias_O)


class FbgemmHalfProduct:
    """A product with a float16 weight packed by FBGEMM."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, bias_O)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        product: Tensor = self._multiply(x_TI, self._packed)
        return product
