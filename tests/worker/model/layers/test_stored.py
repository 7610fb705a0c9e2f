"""Weights that are stacked from parts which a file has in different formats."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from ryzanstein.tools.convert.quantize import quantize
from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.kernels.functions.block_types import Q4_0, Q8_0, BlockType
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.layers.stored import StoredWeight, stacked_product
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, MappedBlocks, PackedBlocks
from ryzanstein.worker.products.formats import WeightFormat

SHAPE = (24, 128)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Matrices:
    """A WeightSource over matrices in memory, some of them in blocks."""

    def __init__(self, native: NativeKernels, kinds: dict[str, BlockType | None]) -> None:
        self.kernels = native
        self.adapters = AdapterSites(native)
        self._format = WeightFormat("none", torch.device("cpu"), torch.float32, native)
        self._blocks: dict[str, Blocks] = {}
        self.floats: dict[str, Tensor] = {}
        self.products = 0
        for name, kind in kinds.items():
            numbers = np.random.default_rng(len(name)).standard_normal(SHAPE, np.float32)
            if kind is not None:
                rows_OB = torch.from_numpy(quantize(numbers, kind).reshape(len(numbers), -1))
                numbers = dequantize(rows_OB.numpy().reshape(-1), kind).reshape(SHAPE).copy()
                self._blocks[name] = MappedBlocks(kind, rows_OB, None, lambda: None)
            self.floats[name] = torch.from_numpy(numbers)

    def new(self, *shape: int) -> Tensor:
        return torch.zeros(shape)

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        out.copy_(self.floats[name].narrow(dim, start, out.shape[dim]))

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return self._blocks.get(name)

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        self.products += 1
        return self._format.product(weight_OI, bias_O, kept=kept)

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        self.products += 1
        memory = torch.zeros(self._format.blocks_bytes(parts, num_outputs), dtype=torch.uint8)
        return self._format.packed_blocks(parts, num_outputs, memory)


@pytest.mark.parametrize(
    ("kinds", "num_products"),
    [((Q8_0, Q8_0, Q8_0), 1), ((Q4_0, Q4_0, Q8_0), 2), ((Q4_0, None, Q8_0), 3), ((None, None, Q4_0), 2), ((None,) * 3, 1)],
    ids=["one type", "two types", "blocks and floats", "floats and blocks", "floats"],
)
def test_outputs_follow_each_other_whatever_keeps_them(
    kernels: NativeKernels, kinds: tuple[BlockType | None, ...], num_products: int
) -> None:
    source = Matrices(kernels, dict(zip(("q", "ke", "val"), kinds, strict=True)))
    parts = [StoredWeight(source, name, SHAPE).rows(5, 13) for name in source.floats]
    bias_O, x_TI = normal(1, 39), normal(2, 6, 128)
    found_TO = stacked_product(source, parts, bias_O)(x_TI)
    expected_TO = x_TI @ torch.cat([whole[5:18] for whole in source.floats.values()]).t() + bias_O
    assert (found_TO - expected_TO).norm() < 0.01 * expected_TO.norm()
    assert source.products == num_products


@pytest.mark.parametrize("count", [64, 48])
def test_columns_that_are_not_whole_blocks_become_floats(kernels: NativeKernels, count: int) -> None:
    source = Matrices(kernels, {"down": Q4_0})
    part = StoredWeight(source, "down", SHAPE).columns(count, count)
    assert (part.blocks() is None) == (count == 48)
    x_TI, expected_OI = normal(3, 4, count), source.floats["down"][:, count : 2 * count]
    error_TO = stacked_product(source, [part], None)(x_TI) - x_TI @ expected_OI.t()
    assert error_TO.abs().max() < (1e-4 if count == 48 else 0.5)
