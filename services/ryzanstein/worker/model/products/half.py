"""Products of float32 rows with weights of 16 bits: half the memory to read, sums in float32.

Our own kernel where there is one, else FBGEMM's. With either, what a row gives does not depend on the other rows. Weights that
a checkpoint stores in bfloat16 or float16 lose nothing, as long as they are between 2^-14 and 65504 in size; smaller ones are
rounded to a multiple of 2^-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.products import Product
from ryzanstein.worker.model.products.floats import Packed
from ryzanstein.worker.model.refusal import ModelRefused

_LARGEST = torch.finfo(torch.float16).max


def half_product(weight_OI: Tensor, bias_O: Tensor | None, native: NativeKernels | None) -> Product:
    """Raises ModelRefused for a weight that float16 cannot hold."""
    least, most = (float(bound) for bound in weight_OI.aminmax())
    largest = max(-least, most)
    if not largest <= _LARGEST:
        raise ModelRefused(f"quantization fp16: a weight of {largest} is beyond float16's {_LARGEST}")
    if native is not None:
        return Packed(weight_OI, bias_O, native, torch.float16)
    return FbgemmHalfProduct(weight_OI, bias_O)


class FbgemmHalfProduct:
    """A float16 weight packed by FBGEMM."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, bias_O)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        product: Tensor = self._multiply(x_TI, self._packed)
        return product
