"""How a model can be computed: the formats of its weights, the kernels. Settings and ranks know them, without torch."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["none", "fp16", "int8"]
Kernels = Literal["auto", "native", "torch"]

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
