"""The formats in which a model's weights can be kept. Known by settings and ranks alike, without importing torch."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["none", "fp16", "int8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
