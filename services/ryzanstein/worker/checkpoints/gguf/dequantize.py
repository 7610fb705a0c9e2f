"""Blocks as float32, with the same bits as ggml computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ryzanstein.worker.checkpoints.gguf import small_blocks, super_blocks
from ryzanstein.worker.checkpoints.gguf.file import GgufTensor
from ryzanstein.worker.checkpoints.gguf.small_blocks import Bytes, Numbers
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import BlockType

_WINDOW_NUMBERS = 2**20
"""At most so many numbers are unpacked at a time, but at least a row: a window takes about 16 MB."""


def _f32(blocks: Bytes) -> Numbers:
    return blocks.view(np.float32)


def _bf16(blocks: Bytes) -> Numbers:
    return (blocks.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


_UNPACK: Mapping[BlockType, Callable[[Bytes], Numbers]] = {
    block_types.F32: _f32,
    block_types.F16: small_blocks.half,
    block_types.BF16: _bf16,
    block_types.Q4_0: small_blocks.q4_0,
    block_types.Q4_1: small_blocks.q4_1,
    block_types.Q5_0: small_blocks.q5_0,
    block_types.Q5_1: small_blocks.q5_1,
    block_types.Q8_0: small_blocks.q8_0,
    block_types.IQ4_NL: small_blocks.iq4_nl,
    block_types.MXFP4: small_blocks.mxfp4,
    block_types.Q2_K: super_blocks.q2_k,
    block_types.Q3_K: super_blocks.q3_k,
    block_types.Q4_K: super_blocks.q4_k,
    block_types.Q5_K: super_blocks.q5_k,
    block_types.Q6_K: super_blocks.q6_k,
    block_types.IQ4_XS: super_blocks.iq4_xs,
    block_types.TQ1_0: super_blocks.tq1_0,
    block_types.TQ2_0: super_blocks.tq2_0,
}


def dequantize(blocks: memoryview | Bytes, kind: BlockType) -> Numbers:
    """Returns the numbers of whole blocks, in one dimension.

    A scale that is not finite gives numbers that are not; there is no warning.
    """
    stored = np.frombuffer(blocks, np.uint8).reshape(-1, kind.num_bytes)
    with np.errstate(all="ignore"):
        return _UNPACK[kind](stored).reshape(-1)


def row_windows(tensor: GgufTensor) -> Iterator[tuple[int, Numbers]]:
    """Yields the rows of a tensor as float32, a window of them at a time.

    Each window is the number of its first row, and the rows [R, row].
    """
    row_numbers, num_rows = tensor.shape[-1], tensor.num_rows
    step = max(1, _WINDOW_NUMBERS // row_numbers)
    for first in range(0, num_rows, step):
        count = min(step, num_rows - first)
        yield first, dequantize(tensor.rows(first, count), tensor.type).reshape(count, row_numbers)
