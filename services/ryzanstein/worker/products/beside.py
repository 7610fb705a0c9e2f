"""Several products of the same rows, whose outputs follow each other: weights that are kept in different formats.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.products import Product


class Beside:
    """A product whose outputs are those of the first product, then those of the next."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([product(x_TI) for product in self._products], dim=1)
