"""The numbers in which matrices are multiplied: float32, or bfloat16 with sums in float32 where the machine is faster so.

oneDNN rounds the inputs of a product, and nothing else: weights, sums and results stay float32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

Compute = Literal["float32", "bfloat16"]
_NAMES = {"float32": "ieee", "bfloat16": "bf16"}
_SIZES = (256, 1024, 1024)
_ROUNDS = 3
_FASTER = 1.2


def fastest() -> Compute:
    """Returns bfloat16 if the machine has instructions for it and a product was faster with them."""
    if not torch.backends.mkldnn.is_available() or not (  # type: ignore[no-untyped-call]
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return "float32"
    rows, inputs, outputs = _SIZES
    x_TI, weight_OI = torch.ones(rows, inputs), torch.ones(outputs, inputs)
    spent: dict[Compute, float] = {"float32": _time(x_TI, weight_OI, "float32"), "bfloat16": _time(x_TI, weight_OI, "bfloat16")}
    return "bfloat16" if spent["float32"] > _FASTER * spent["bfloat16"] else "float32"


def _time(x_TI: torch.Tensor, weight_OI: torch.Tensor, compute: Compute) -> float:
    found = []
    with computing(compute):
        for _ in range(_ROUNDS):
            begun = time.process_time()
            x_TI @ weight_OI.t()
            found.append(time.process_time() - begun)
    return min(found)


@contextmanager
def computing(compute: str) -> Iterator[None]:
    """Multiplies so inside the block."""
    library: Any = torch.backends.mkldnn
    settings = library.matmul
    before, settings.fp32_precision = settings.fp32_precision, _NAMES[compute]
    try:
        yield
    finally:
        settings.fp32_precision = before
