"""The paged cache of keys and values: one rank's heads, all layers, as many blocks as every other rank has.

A slot holds one token's keys, then its values, side by side: a step writes both with one call, and adjacent blocks read as
one long view. A latent (DeepSeek-V2) is key and value at once, and there once.

Legend: L layers, N slots (blocks x block size), C columns of a slot (2 x key-value heads of this rank x head dimension).
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
    """Memory that the scheduler hands out by block number.

    Behind the blocks of each layer one slot stays zero, for padding to point at; behind it, on CPUs, is the staging place.
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
        """The layer's slots [N, C]."""
        return self._pages_LNC[index]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self._pages_LNC[0, 0].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self._pages_LNC[:, : self.num_slots].nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU zeros of the operating system's, which take no memory before they are written; torch would write them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw)[skip : skip + raw.nbytes - _ALIGNMENT].view(dtype).view(shape)


def slot_width(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Columns of a slot on this rank."""
    num_parts = 2 if spec.latent is None else 1
    return num_parts * tp.heads(spec.num_heads, spec.num_kv_heads).num_kv_heads * spec.head_dim


def block_bytes(spec: DecoderSpec, tp: TensorParallel, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank, all layers together. Every rank has the same number of heads, so all agree."""
    return spec.num_layers * block_size * slot_width(spec, tp) * dtype.itemsize


def blocks_in(budget_bytes: int, bytes_per_block: int) -> int:
    """How many blocks fit the budget of one rank. Raises ModelRefused when not even one does."""
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelRefused(f"a KV cache of {budget_bytes} bytes per rank is smaller than one block of {bytes_per_block} bytes")
    return num_blocks
