"""The paged KV cache of one rank: its heads, all layers, as many blocks as every other rank.

A slot holds one token's keys, then its values, side by side: a step writes both with one call, and
adjacent blocks are read as one long view. A latent (DeepSeek-V2) is both key and value and is
stored once.

Legend: L layers, N slots (blocks x block size), C columns of a slot (2 x key-value heads of this
rank x head dimension).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.parallel import TensorParallel
from ryzanstein.worker.model.refusal import ModelRefused
from ryzanstein.worker.model.staging import staging_slots

_ALIGNMENT = 64  # bytes of a cache line


class KVCache:
    """The memory that the scheduler allocates by block number.

    In each layer one slot after the blocks stays zero: padding refers to it. On CPUs the staging
    area follows that slot.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_slots = num_blocks * block_size
        on_cpu = device.type == "cpu"
        self.num_staging = staging_slots(num_layers, width * dtype.itemsize, self.num_slots) if on_cpu else 0
        self._pages_LNC = _zeros((num_layers, self.num_slots + 1 + self.num_staging, width), dtype, device)

    def layer(self, index: int) -> Tensor:
        """Returns the layer's slots, [N, C]."""
        return self._pages_LNC[index]

    @property
    def slot_bytes(self) -> int:
        """The size of one token in one layer, in bytes."""
        return self._pages_LNC[0, 0].nbytes

    @property
    def nbytes(self) -> int:
        """The size of the blocks, in bytes."""
        return self._pages_LNC[:, : self.num_slots].nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on a CPU from the operating system, without writing them.

    Such pages take no memory until they are written. torch would write them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw)[skip : skip + raw.nbytes - _ALIGNMENT].view(dtype).view(shape)


def slot_width(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Returns the number of columns of a slot on this rank."""
    num_parts = 2 if spec.latent is None else 1
    return num_parts * tp.heads(spec.num_heads, spec.num_kv_heads).num_kv_heads * spec.head_dim


def block_bytes(spec: DecoderSpec, tp: TensorParallel, block_size: int, dtype: torch.dtype) -> int:
    """Returns the size of one block over all layers on this rank, in bytes.

    Every rank has the same number of heads, so all ranks get the same result.
    """
    return spec.num_layers * block_size * slot_width(spec, tp) * dtype.itemsize


def blocks_in(budget_bytes: int, bytes_per_block: int) -> int:
    """Returns how many blocks fit the budget of one rank. Raises ModelRefused if none fits."""
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelRefused(f"a KV cache of {budget_bytes} bytes per rank is smaller than one block of {bytes_per_block} bytes")
    return num_blocks
