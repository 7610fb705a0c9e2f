"""Names of weight formats, cache formats and kernels. Settings and ranks use them without torch."""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["none", "fp16", "int8"]
"""How weights are kept."""
Quantization = Literal["none", "fp16", "int8", "auto"]
"""The setting: a format, or that the model's own answers decide which (`model.choosing`)."""
KvDtype = Literal["auto", "float16"]
KvCompression = Literal["none", "lazy-fp8", "eager-fp8", "lazy-int8", "lazy-fp8-values", "lazy-int8-channels"]
"""How keys and values are kept that are not among the newest (`model.zones`)."""
Kernels = Literal["auto", "native", "torch"]
Step = Literal["auto", "python"]

QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
KV_COMPRESSIONS: tuple[KvCompression, ...] = get_args(KvCompression)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
STEPS: tuple[Step, ...] = get_args(Step)
