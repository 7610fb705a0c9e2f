"""How rows are multiplied by a weight: as floats, with weights of 16 bits, or as 8-bit integers.

A layer hands its weight over once, while it is loaded, and gets a `Product`. The layer knows no format, a format no layer.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """x times one weight, plus the bias where there is one: [T, I] to [T, O]. Does not change x."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...
