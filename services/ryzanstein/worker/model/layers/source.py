"""Where layers get their weights. Different sources check, load or list a checkpoint."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.products import Product


class WeightSource(Protocol):
    """A source of memory for weights, and of their numbers.

    `kernels` are those that layers may use besides torch.
    """

    kernels: NativeKernels | None

    def new(self, *shape: int) -> Tensor:
        """Returns zeros for a layer to keep, of the model's dtype and device."""
        ...

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        """Fills `out` from the tensor `name`, whose whole shape must be `shape`.

        Along `dim` it reads `start` to `start + out.shape[dim]`. What is past the end stays zero.
        """
        ...

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        """Returns the product with a weight that has been read. `kept`: it has another reader."""
        ...
