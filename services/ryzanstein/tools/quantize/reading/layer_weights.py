"""The weights of one decoder layer, held so that they can be watched and replaced.

A layer is built from `LayerWeights` as from any source. Each of its products is then a `Site`,
which knows the stored matrices that it multiplies by: no list of an architecture's names is needed.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.checkpoints.checkpoint import WeightFiles
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks
from ryzanstein.worker.products.int8 import FillRows, Int8Table

_LEVELS = 127


@dataclass(slots=True)
class InputStatistics:
    """What the inputs of a site were like: the sum of x^T x, the sums of |x|, the number of rows."""

    hessian_II: Tensor
    absolute_I: Tensor
    num_rows: int = 0

    @classmethod
    def of(cls, num_inputs: int) -> InputStatistics:
        return cls(torch.zeros(num_inputs, num_inputs), torch.zeros(num_inputs))

    def add(self, x_TI: Tensor) -> None:
        self.hessian_II.addmm_(x_TI.t(), x_TI)
        self.absolute_I += x_TI.abs().sum(dim=0)
        self.num_rows += len(x_TI)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of a stored tensor, and the memory into which it was read."""

    name: str
    shape: tuple[int, ...]
    out: Tensor
    dim: int
    start: int

    def put(self, stored: Tensor) -> None:
        """Replaces what was read by the same part of another tensor."""
        self.out.copy_(stored.narrow(self.dim, self.start, self.out.shape[self.dim]))


@dataclass(slots=True, eq=False)
class Site:
    """A product of a layer.

    While it is `watching`, its inputs are added to the statistics. `rounds_inputs`: to 8 bits a row,
    as W8A8 does.
    """

    weight_OI: Tensor
    bias_O: Tensor | None
    pieces: Sequence[Piece]
    watched: InputStatistics | None = None
    watching: bool = False
    rounds_inputs: bool = False

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.watching and self.watched is not None:
            self.watched.add(x_TI)
        return F.linear(rounded_rows(x_TI) if self.rounds_inputs else x_TI, self.weight_OI, self.bias_O)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The stored matrices, [outputs, inputs] each, in order."""
        return {piece.name: (piece.shape[0], piece.shape[1]) for piece in self.pieces}

    def put(self, name: str, stored: Tensor) -> None:
        for piece in self.pieces:
            if piece.name == name:
                piece.put(stored)


def rounded_rows(x_TI: Tensor) -> Tensor:
    """Returns rows rounded to 8-bit levels, with a scale of each row."""
    scale_T1 = (x_TI.abs().amax(dim=1, keepdim=True) / _LEVELS).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x_TI / scale_T1).round_().mul_(scale_T1)


@dataclass(slots=True)
class LayerWeights:
    """A WeightSource of float32 on the CPU, without kernels: torch's operators run on every machine.

    `sites` are the products in the order in which they were built. A matrix that is read but not
    multiplied through `product` (a router, an absorbed projection) is in no site.
    """

    files: WeightFiles
    kernels: NativeKernels | None = None
    adapters: AdapterSites = field(default_factory=AdapterSites)
    sites: list[Site] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)

    def new(self, *shape: int) -> Tensor:
        return torch.zeros(shape)

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        self.files.check(name, shape)
        self.files.read(name, shape, out, dim, start)
        self._pieces.append(Piece(name, shape, out, dim, start))

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return None

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        return None

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        raise AssertionError("there are no blocks")

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        memory = weight_OI.untyped_storage().data_ptr()
        own = [piece for piece in self._pieces if piece.out.untyped_storage().data_ptr() == memory]
        site = Site(weight_OI, bias_O, own)
        self.sites.append(site)
        return site

    def watch(self) -> None:
        """Begins to add up statistics."""
        for site in self.sites:
            site.watched, site.watching = InputStatistics.of(site.weight_OI.shape[1]), True

    def watch_no_more(self) -> None:
        """Keeps the statistics as they are."""
        for site in self.sites:
            site.watching = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The stored tensors that were read, and their whole shapes."""
        return {piece.name: piece.shape for piece in self._pieces}

    def put(self, name: str, stored: Tensor) -> None:
        """Replaces a tensor wherever it was read."""
        for piece in self._pieces:
            if piece.name == name:
                piece.put(stored)

    def floats(self, name: str) -> Tensor:
        """Returns a whole stored tensor."""
        shape = self.shapes[name]
        out = torch.zeros(shape)
        self.files.read(name, shape, out)
        return out
