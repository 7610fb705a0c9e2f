"""What a product of our own kernels keeps: a program of a step (`kernels/step.c`) multiplies with the same memory.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from ryzanstein.worker.products import Product

WeightKind = Literal["floats", "halves", "unpacked", "bytes", "blocks"]


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight [O, I] in the memory of our own kernels.

    `scale_O` and the `block` of the transform are those of 8-bit weights, `type` is that of blocks.
    """

    kind: WeightKind
    weight: Tensor
    shape: tuple[int, int]
    bias_O: Tensor | None
    scale_O: Tensor | None = None
    block: int = 1
    type: int = 0


@dataclass(frozen=True, slots=True)
class NativeStack:
    """The weights of one layer, whose outputs follow each other; none if other kernels multiply.

    `site`: where adapters that add to the result are, see `AdapterSite.address`; None: none can.
    """

    weights: Sequence[NativeWeight]
    site: int | None = None

    @property
    def width(self) -> int:
        """The number of outputs."""
        return sum(weight.shape[0] for weight in self.weights)


@runtime_checkable
class NativeProduct(Protocol):
    """A product that may be one of our own kernels."""

    def native(self) -> Sequence[NativeWeight]:
        """Returns the weights whose outputs follow each other; none: it is another product."""
        ...


def native_weights(product: Product) -> Sequence[NativeWeight]:
    """Returns what a product keeps; nothing if it is not one of our own kernels."""
    return product.native() if isinstance(product, NativeProduct) else ()
