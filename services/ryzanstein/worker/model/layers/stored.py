"""A matrix as a file has it, the slice of it that a rank needs, and the product that keeps it.

A matrix of floats is read into memory and becomes a product of the model's format. One in blocks of
GGUF stays in its blocks, if they can be sliced so; otherwise it is read as floats too.

Legend: T rows, I inputs, O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import Tensor

from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.blocks import Blocks
from ryzanstein.worker.products.by_rows import SideBySide


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A matrix of `stored_shape`, or from `start` on `count` of its rows, or of its columns (`dim` 1).

    Nothing is read before `blocks` or `fill` is called. `transposed`: it is stored as [I, O].
    """

    source: WeightSource
    name: str
    stored_shape: tuple[int, int]
    transposed: bool = False
    dim: int = 0
    start: int = 0
    count: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, num_columns = self.stored_shape
        if self.count is None:
            return self.stored_shape
        return (self.count, num_columns) if self.dim == 0 else (num_rows, self.count)

    def rows(self, start: int, count: int) -> StoredWeight:
        """Returns some rows of a whole matrix."""
        return replace(self, dim=0, start=start, count=count)

    def columns(self, start: int, count: int) -> StoredWeight:
        """Returns some columns of a whole matrix."""
        return replace(self, dim=1, start=start, count=count)

    def blocks(self) -> Blocks | None:
        """Returns its blocks, or None if it is to be read as floats."""
        whole = None if self.transposed else self.source.blocks(self.name, self.stored_shape)
        if whole is None or self.count is None:
            return whole
        return whole.rows(self.start, self.count) if self.dim == 0 else whole.columns(self.start, self.count)

    def fill(self, out_OI: Tensor) -> None:
        """Reads it as floats."""
        if self.transposed:
            self.source.read(self.name, self.stored_shape[::-1], out_OI.t(), dim=1 - self.dim, start=self.start)
        else:
            self.source.read(self.name, self.stored_shape, out_OI, dim=self.dim, start=self.start)


def stacked_product(source: WeightSource, parts: Sequence[StoredWeight], bias_O: Tensor | None) -> Product:
    """Returns the product with weights that are stacked: their outputs follow each other.

    Neighbours that are kept in the same way become one weight.
    """
    products: list[Product] = []
    first = 0
    both = [(part, part.blocks()) for part in parts]
    for kind, group in groupby(both, key=lambda pair: None if pair[1] is None else pair[1].kind):
        members = list(group)
        count = sum(part.shape[0] for part, _ in members)
        bias = None if bias_O is None else bias_O.narrow(0, first, count)
        if kind is None:
            products.append(_float_product(source, [part for part, _ in members], bias))
        else:
            products.append(source.packed([blocks for _, blocks in members if blocks is not None], count).product(bias))
        first += count
    return products[0] if len(products) == 1 else SideBySide(products)


def _float_product(source: WeightSource, parts: Sequence[StoredWeight], bias_O: Tensor | None) -> Product:
    weight_OI = source.new(sum(part.shape[0] for part in parts), parts[0].shape[1])
    first = 0
    for part in parts:
        count = part.shape[0]
        part.fill(weight_OI.narrow(0, first, count))
        first += count
    return source.product(weight_OI, bias_O)
