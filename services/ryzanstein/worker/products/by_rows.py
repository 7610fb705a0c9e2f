"""Products that are made of other products.

`ByRows` has two packings of one weight, each the faster one for some numbers of rows. `SideBySide` has several weights,
which are kept in different formats and whose outputs follow each other.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.products import Product
from ryzanstein.worker.products.native import NativeWeight, native_weights


class ByRows:
    """A product that uses `few` below `from_rows` rows and `many` from there on.

    Both must give the same bits, or a row's result would depend on the other rows.
    """

    def __init__(self, few: Product, many: Product, from_rows: int) -> None:
        self._few, self._many, self._from_rows = few, many, from_rows

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._few(x_TI) if len(x_TI) < self._from_rows else self._many(x_TI)

    def native(self) -> Sequence[NativeWeight]:
        return native_weights(self._few)


class SideBySide:
    """A product whose outputs are those of the first product, then those of the next."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([product(x_TI) for product in self._products], dim=1)

    def native(self) -> Sequence[NativeWeight]:
        found = [native_weights(product) for product in self._products]
        return [weight for weights in found for weight in weights] if all(found) else []
