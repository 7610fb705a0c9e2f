"""Where layers get their weights. Different sources check, load or list a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks
from ryzanstein.worker.products.int8 import FillRows, Int8Table


class WeightSource(Protocol):
    """A source of memory for weights, and of their numbers.

    `kernels` are those that layers may use besides torch. `adapters` knows the weights that adapters may add to.
    """

    kernels: NativeKernels | None
    adapters: AdapterSites

    def new(self, *shape: int) -> Tensor:
        """Returns zeros for a layer to keep, of the model's dtype and device."""
        ...

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        """Fills `out` from the tensor `name`, whose whole shape must be `shape`.

        Along `dim` it reads `start` to `start + out.shape[dim]`. What is past the end stays zero.
        """
        ...

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """Returns the blocks of the matrix `name`, if it is to be kept as the file has it."""
        ...

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        """Returns the product with a weight that has been read. `kept`: it has another reader."""
        ...

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        """Returns a weight that is looked up and multiplied, or None if the caller is to keep its floats."""
        ...

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        """Returns a weight of blocks of one type, stacked. Outputs that no part has are zeros."""
        ...
