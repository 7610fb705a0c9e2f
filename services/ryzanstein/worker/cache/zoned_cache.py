"""A KV cache whose blocks are compressed, with a small pool of hot pages in full precision.

New tokens are written to hot pages. A page that is full is sealed: compressed into its blocks, one
for each group of layers. Attention reads both, see `Extents` for which and when.

Legend: P planes, B blocks, X bytes of a block in one plane.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.worker.cache.kv_cache import KVCache, LayerPages, release_memory, zeros


class ZonedCache:
    """The blocks and the hot pages of one rank, by number."""

    num_staging = 0

    def __init__(self, num_planes: int, num_blocks: int, block_bytes: int, hot: KVCache) -> None:
        """`block_bytes` is the size of a block in one plane; `hot` has a plane for each layer."""
        self.num_blocks, self.hot = num_blocks, hot
        shape = (num_planes, num_blocks, block_bytes)
        self._cold_PBX, self._memory = zeros(shape, torch.uint8, hot.plane(0).device)

    def pages(self, layer: int, plane: int, count: int = 1) -> LayerPages:
        """Returns what a layer writes and reads. No layer of a compressed cache has more than one plane."""
        assert count == 1
        return LayerPages(self.hot.plane(layer), self._cold_PBX[plane])

    def block(self, index: int) -> Tensor:
        """Returns a block in all planes, [P, X]."""
        return self._cold_PBX[:, index]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, each from the first number to the second. No block is in both places."""
        for source, target in moves:
            self._cold_PBX[:, target].copy_(self._cold_PBX[:, source])

    def bound(self, blocks: Sequence[int]) -> None:
        """Does nothing: pages that are chosen by query are not compressed."""

    def release(self, num_blocks: int) -> None:
        """Returns the memory of the blocks from this number on to the system, see `KVCache`."""
        if self._memory is not None:
            release_memory(self._memory, self._cold_PBX, num_blocks, self.num_blocks)

    @property
    def slot_bytes(self) -> int:
        """The size of one hot token in one layer, in bytes."""
        return self.hot.slot_bytes

    @property
    def nbytes(self) -> int:
        """The size of the blocks, in bytes."""
        return self._cold_PBX.nbytes

    @property
    def hot_bytes(self) -> int:
        """The size of the hot pages, in bytes."""
        return self.hot.nbytes
