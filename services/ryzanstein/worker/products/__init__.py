"""Products of rows and a weight: in floats, with 16-bit weights, or in 8-bit integers.

A layer passes its weight once, while it is loaded, and gets a `Product`. Layers do not depend on
formats, and formats do not depend on layers.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """A product of x and a weight, plus the bias if any: [T, I] to [T, O]. It does not change x."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...
