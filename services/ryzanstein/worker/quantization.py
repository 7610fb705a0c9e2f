"""Names of weight formats, cache formats and kernels. Settings and ranks use them without torch."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["none", "fp16", "int8"]
"""How weights are kept."""
Quantization = Literal["none", "fp16", "int8", "auto"]
"""The setting: a format, or that the model's own answers decide which (`model.choosing`)."""
KvDtype = Literal["auto", "float16"]
Kernels = Literal["auto", "native", "torch"]

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
