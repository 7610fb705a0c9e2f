"""The KV cache of one rank with cold pages: a small pool of hot pages, and blocks of cold ones.

All tokens of a step are written to hot pages, in full precision. A page that becomes full is sealed
into its cold block in the same step; its hot copy stays until no query sees it hot any more. A hot
page is 16 tokens of all layers, since all need it at the same time; a cold block is 16 tokens of
the layers of one group, as in `KVCache`.

Legend: L layers, P planes, N hot slots, C columns of a slot, B cold blocks, X bytes of a block in
one plane.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from ryzanstein.worker.model.attention import LayerPages
from ryzanstein.worker.model.cold_layout import PAGE_TOKENS, ColdLayout
from ryzanstein.worker.model.kv_cache import mapped_zeros


class ZonedCache:
    """The memory of both kinds of pages. The scheduler allocates both by number."""

    def __init__(
        self,
        sizes: tuple[int, int],
        num_hot: int,
        num_blocks: int,
        layout: ColdLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`sizes` are the numbers of layers and of planes."""
        num_layers, num_planes = sizes
        width = 2 * layout.num_kv_heads * layout.head_dim
        self.num_blocks, self.num_hot, self.block_size, self.layout = num_blocks, num_hot, PAGE_TOKENS, layout
        self._hot_LNC, _ = mapped_zeros((num_layers, num_hot * PAGE_TOKENS, width), dtype, device)
        self._cold_PBX, self._memory = mapped_zeros((num_planes, num_blocks, layout.block_bytes), torch.uint8, device)

    def pages(self, layer: int, plane: int) -> LayerPages:
        """Returns what a layer reads and writes. Layers of different groups share a plane, but no hot slots."""
        return LayerPages(self._hot_LNC[layer], self._cold_PBX[plane])

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies cold blocks, each from the first number to the second. No block is in both places."""
        for source, target in moves:
            self._cold_PBX[:, target].copy_(self._cold_PBX[:, source])

    def release(self, num_blocks: int) -> None:
        """Returns the memory of the cold blocks from this number on to the system, in whole pages.

        Their contents are lost. On a GPU nothing happens.
        """
        if self._memory is None:
            return
        plane_bytes = self._cold_PBX[0].nbytes
        for plane in range(len(self._cold_PBX)):
            start = plane * plane_bytes + num_blocks * self.layout.block_bytes
            start += -start % mmap.PAGESIZE
            end = (plane + 1) * plane_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if start < end:
                self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    @property
    def nbytes(self) -> int:
        """The size of the cold blocks, in bytes."""
        return self._cold_PBX.nbytes

    @property
    def hot_bytes(self) -> int:
        """The size of the hot pages, in bytes."""
        return self._hot_LNC.nbytes
