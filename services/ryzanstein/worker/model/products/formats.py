"""The format in which a model's weights are kept for their products, chosen for the whole model.

Legend: I inputs, O outputs.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ryzanstein.worker.model.products import Product
from ryzanstein.worker.model.products.fastest import FastestKernel
from ryzanstein.worker.model.products.floats import float_product
from ryzanstein.worker.model.products.half import HalfProduct
from ryzanstein.worker.model.products.int8 import Int8Product
from ryzanstein.worker.model.refusal import ModelRefused
from ryzanstein.worker.quantization import Quantization

_PACKED_ITEM_BYTES = {"fp16": 2, "int8": 1}
_OUTPUT_BYTES = {"fp16": 0, "int8": 8}  # a scale and a sum of weights


class WeightFormat:
    """Makes products. Raises ModelRefused where device or dtype cannot have the quantization."""

    def __init__(self, quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
        self._quantization = quantization
        if quantization == "none":
            return
        if device.type != "cpu" or dtype != torch.float32:
            raise ModelRefused(f"quantization {quantization} needs float32 on a CPU, not {dtype} on {device}")
        if quantization == "fp16" and "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ModelRefused("quantization fp16: this torch has no FBGEMM")

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        """The caller may forget the weight. `kept`: it does not, for another reader."""
        if self._quantization == "fp16":
            return HalfProduct(weight_OI, bias_O)
        if self._quantization == "int8":
            return Int8Product(weight_OI, bias_O, self._kernels.of_shape(*weight_OI.shape))
        return float_product(weight_OI, bias_O, kept=kept)

    @property
    def copies(self) -> bool:
        """Whether a product of a kept weight has numbers of its own."""
        return self._quantization != "none"

    def packed_bytes(self, weight_OI: Tensor) -> int:
        """What a product keeps of such a weight."""
        if self._quantization == "none":
            return weight_OI.nbytes
        return weight_OI.numel() * _PACKED_ITEM_BYTES[self._quantization] + len(weight_OI) * _OUTPUT_BYTES[self._quantization]

    @cached_property
    def _kernels(self) -> FastestKernel:
        return FastestKernel()
