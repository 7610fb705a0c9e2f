"""Lists the tensors that a decoder reads, without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks
from ryzanstein.worker.products.int8 import FillRows, Int8Table


def tensor_shapes(spec: DecoderSpec) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every tensor of the decoder by its name in a checkpoint."""
    listing = _Listing()
    Decoder(listing, TensorParallel(0, 1, LocalCollectives()), spec)
    return listing.shapes


class _Listing:
    """A WeightSource that only records the tensors that are read."""

    def __init__(self) -> None:
        self.kernels: NativeKernels | None = None
        self.adapters = AdapterSites()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        self.shapes[name] = shape

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return None

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        return None

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        raise AssertionError("there are no blocks")

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        return lambda x_TI: x_TI
