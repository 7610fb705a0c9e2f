"""The paged KV cache of one rank: its heads, all layers, as many blocks as every other rank.

A block serves the layers of one group (see `layer_groups`): each has a plane of it. A plane of the
cache thus belongs to one layer of every group, and a group's block table says which slots of it.

A slot holds one token's keys, then its values, side by side: a step writes both with one call, and
adjacent blocks are read as one long view. A latent (DeepSeek-V2) is both key and value and is
stored once.

Legend: P planes, N slots (blocks x block size), C columns of a slot (2 x key-value heads of this
rank x head dimension).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.cache.staging import staging_slots

_HUGE_BYTES = 4 * 2**20  # from here on large pages are worth it
_MAP_NORESERVE = 0x4000  # of Linux: what may be borrowed exceeds what there is


@dataclass(frozen=True, slots=True)
class LayerPages:
    """What a layer writes and reads: slots [N, C], and its compressed blocks [B, X] if there are any.

    `bounds_B2Y` are the least and the greatest keys of each block, where pages are chosen by query.
    A layer with several planes has them in `planes_PNC`, of which `slots_NC` is the first.
    """

    slots_NC: Tensor
    cold_BX: Tensor | None = None
    bounds_B2Y: Tensor | None = None
    planes_PNC: Tensor | None = None

    @property
    def beyond(self) -> int:
        """How many numbers the last plane is behind the first. A layer's values are at the end of a slot there."""
        planes_PNC = self.planes_PNC
        return 0 if planes_PNC is None or len(planes_PNC) == 1 else (len(planes_PNC) - 1) * planes_PNC.stride(0)

    def select(self, slots: slice | Tensor) -> Tensor:
        """Returns some slots with the columns of all planes side by side: a view, or a copy."""
        planes_PNC = self.planes_PNC
        if planes_PNC is None or len(planes_PNC) == 1:
            return self.slots_NC[slots] if isinstance(slots, slice) else self.slots_NC.index_select(0, slots)
        found_PNC = planes_PNC[:, slots] if isinstance(slots, slice) else planes_PNC.index_select(1, slots)
        return torch.cat(list(found_PNC), dim=1)


class KVCache:
    """The memory that the scheduler allocates by block number.

    In each plane one slot after the blocks stays zero: padding refers to it. The staging area of
    the only group follows that slot, on CPUs and if it is `staged`.
    """

    def __init__(
        self,
        num_planes: int,
        num_blocks: int,
        block_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        staged: bool = True,
        bounded: bool = False,
    ) -> None:
        """`bounded`: the least and the greatest keys of full blocks are kept besides."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_slots = num_blocks * block_size
        stages = staged and device.type == "cpu"
        self.num_staging = staging_slots(num_planes, width * dtype.itemsize, self.num_slots) if stages else 0
        self._pages_PNC, self._memory = zeros((num_planes, self.num_slots + 1 + self.num_staging, width), dtype, device)
        self._bounds_PB2Y, self._bounds_memory = None, None
        if bounded:
            self._bounds_PB2Y, self._bounds_memory = zeros((num_planes, num_blocks, 2, width // 2), torch.float32, device)

    def plane(self, index: int) -> Tensor:
        """Returns the slots of one layer of each group, [N, C]."""
        return self._pages_PNC[index]

    def pages(self, layer: int, plane: int, count: int = 1) -> LayerPages:
        """Returns what a layer writes and reads, in `count` planes."""
        del layer  # a `ZonedCache` asks for it
        bounds = None if self._bounds_PB2Y is None else self._bounds_PB2Y[plane]
        return LayerPages(self.plane(plane), bounds_B2Y=bounds, planes_PNC=self._pages_PNC[plane : plane + count])

    def block(self, index: int) -> Tensor:
        """Returns the slots of a block in all planes, [P, block size, C]."""
        return self._pages_PNC[:, index * self.block_size : (index + 1) * self.block_size]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, each from the first number to the second. No block is in both places."""
        size = self.block_size
        for source, target in moves:
            blocks_PSC = self._pages_PNC[:, source * size : (source + 1) * size]
            self._pages_PNC[:, target * size : (target + 1) * size].copy_(blocks_PSC)
            if self._bounds_PB2Y is not None:
                self._bounds_PB2Y[:, target] = self._bounds_PB2Y[:, source]

    def bound(self, blocks: Sequence[int]) -> None:
        """Finds the least and the greatest keys of blocks that were filled from elsewhere, if they are kept."""
        if self._bounds_PB2Y is not None and blocks:
            blocks_M = torch.tensor(blocks)
            for plane, bounds_B2Y in zip(self._pages_PNC, self._bounds_PB2Y, strict=True):
                bound_blocks(plane, bounds_B2Y, blocks_M, self.block_size)

    def release(self, num_blocks: int) -> None:
        """Returns the memory of the blocks from this number on to the system, in whole pages.

        Their contents are lost; they take memory again when they are written. On a GPU nothing
        happens.
        """
        if self._memory is not None:
            release_memory(self._memory, self._pages_PNC, num_blocks * self.block_size, self.num_slots)
        if self._bounds_memory is not None and self._bounds_PB2Y is not None:
            release_memory(self._bounds_memory, self._bounds_PB2Y, num_blocks, self.num_blocks)

    @property
    def slot_bytes(self) -> int:
        """The size of one token in one layer, in bytes."""
        return self._pages_PNC[0, 0].nbytes

    @property
    def nbytes(self) -> int:
        """The size of the blocks, in bytes."""
        bounds = 0 if self._bounds_PB2Y is None else self._bounds_PB2Y.nbytes
        return self._pages_PNC[:, : self.num_slots].nbytes + bounds

    @property
    def hot_bytes(self) -> int:
        """The size of pages beside the blocks: there are none."""
        return 0


def bound_blocks(slots_NC: Tensor, bounds_B2Y: Tensor, blocks_M: Tensor, block_size: int) -> None:
    """Writes the least and the greatest number of each place of the keys of full blocks. A NaN is both."""
    keys_MSY = slots_NC[: len(bounds_B2Y) * block_size].view(len(bounds_B2Y), block_size, -1)
    keys_MSY = keys_MSY[:, :, : bounds_B2Y.shape[2]].index_select(0, blocks_M)
    bounds_B2Y[blocks_M] = torch.stack((keys_MSY.amin(1), keys_MSY.amax(1)), dim=1).float()


def release_memory(memory: mmap.mmap, rows: Tensor, first: int, end: int) -> None:
    """Returns the memory of rows `first` to `end` - 1 of each plane to the system, in whole pages."""
    plane_bytes, row_bytes = rows[0].nbytes, rows[0, 0].nbytes
    for plane in range(len(rows)):
        start = plane * plane_bytes + first * row_bytes
        start += -start % mmap.PAGESIZE
        stop = (plane * plane_bytes + end * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """Returns zeros; on a CPU mapped from the operating system, with the mapping.

    Such pages take no memory until they are written. torch would write them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    if len(memory) >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape), memory
