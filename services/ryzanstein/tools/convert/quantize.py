"""Numbers as blocks: what `ryzanstein convert` writes.

Q8_0, Q4_0 and Q5_0 have the bits that ggml's reference gives. Q4_K and Q6_K choose scales by the
same search as ggml's; the order of sums differs, so that a few blocks do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ryzanstein.tools.convert.scale_search import q4_k, q6_k
from ryzanstein.worker.checkpoints.gguf.small_blocks import Bytes, Numbers
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import BlockType


def quantize(rows: Numbers, kind: BlockType) -> Bytes:
    """Returns the blocks of rows [R, row] as bytes [R, row bytes]."""
    blocks = rows.astype(np.float32, copy=False).reshape(-1, kind.numbers)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return _PACK[kind](blocks).reshape(len(rows), -1)


def stored_as(wanted: BlockType, row_numbers: int) -> BlockType:
    """Returns the type for rows of this length, as llama.cpp chooses it.

    Rows that are not whole blocks of a k-quant become Q5_0 or Q8_0, others F16.
    """
    if row_numbers % wanted.numbers == 0:
        return wanted
    smaller = _FALLBACKS.get(wanted, block_types.F16)
    return smaller if row_numbers % smaller.numbers == 0 else block_types.F16


_FALLBACKS = {block_types.Q4_K: block_types.Q5_0, block_types.Q6_K: block_types.Q8_0}


def _f32(blocks: Numbers) -> Bytes:
    return blocks.view(np.uint8)


def _f16(blocks: Numbers) -> Bytes:
    return blocks.astype(np.float16).view(np.uint8)


def _bf16(blocks: Numbers) -> Bytes:
    """Rounds to the nearest, ties to even; NaN stays NaN."""
    bits = blocks.view(np.uint32)
    nan = np.uint32(0x7F800000) < (bits & np.uint32(0x7FFFFFFF))
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    chosen = np.where(nan, bits | np.uint32(0x400000), rounded)
    return (chosen >> np.uint32(16)).astype(np.uint16).view(np.uint8)


def _q8_0(blocks: Numbers) -> Bytes:
    step = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    values = _rounded(blocks * _inverse(step)).astype(np.int8)
    return _joined(step, values.view(np.uint8))


def _q4_0(blocks: Numbers) -> Bytes:
    step, values = _signed(blocks, 8)
    return _joined(step, values[:, :16] | values[:, 16:] << np.uint8(4))


def _q5_0(blocks: Numbers) -> Bytes:
    step, values = _signed(blocks, 16)
    highest = np.packbits(values >> np.uint8(4), axis=-1, bitorder="little")
    return _joined(step, highest, (values[:, :16] & np.uint8(15)) | values[:, 16:] << np.uint8(4))


def _signed(blocks: Numbers, half_range: int) -> tuple[Numbers, Bytes]:
    """Returns steps [B, 1] and values of 0 to 2 * half_range - 1; the largest number is exact."""
    place = np.abs(blocks).argmax(axis=-1, keepdims=True)
    step = np.take_along_axis(blocks, place, axis=-1) / np.float32(-half_range)
    values = np.trunc(blocks * _inverse(step) + np.float32(half_range + 0.5))
    return step, np.clip(values, 0, 2 * half_range - 1).astype(np.uint8)


def _inverse(step: Numbers) -> Numbers:
    return np.where(step == 0, np.float32(0), np.float32(1) / step)


def _rounded(values: Numbers) -> Numbers:
    """Rounds halves away from zero, as C's roundf does."""
    whole = np.floor(np.abs(values))
    rounded: Numbers = np.copysign(whole + np.floor(2 * (np.abs(values) - whole)), values)
    return rounded


def _joined(step: Numbers, *parts: Bytes) -> Bytes:
    return np.concatenate([step.astype(np.float16).view(np.uint8), *parts], axis=-1)


_PACK: Mapping[BlockType, Callable[[Numbers], Bytes]] = {
    block_types.F32: _f32,
    block_types.F16: _f16,
    block_types.BF16: _bf16,
    block_types.Q8_0: _q8_0,
    block_types.Q4_0: _q4_0,
    block_types.Q5_0: _q5_0,
    block_types.Q4_K: q4_k,
    block_types.Q6_K: q6_k,
}
