"""Where layers get their weights from. The same construction checks a checkpoint, loads it or lists it, by another source."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.products import Product


class WeightSource(Protocol):
    """Memory for weights, and what to fill it with. `kernels` are what layers may compute with besides torch."""

    kernels: NativeKernels | None

    def new(self, *shape: int) -> Tensor:
        """Zeros for a layer to keep, of the model's dtype and device."""
        ...

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        """Fills `out` from the tensor `name`, whose whole shape must be `shape`.

        Along `dim` it takes `start` to `start + out.shape[dim]`; what lies past the end stays zero.
        """
        ...

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        """How rows are multiplied by a weight that has been read. `kept`: something else reads the weight as well."""
        ...
