"""Unpacks blocks of 256 numbers: one or two 16-bit scales, scales of their parts, and the numbers.

Each function takes blocks [B, bytes] of uint8 and returns numbers [B, 256] of float32. The order of
operations is ggml's, so that the bits are. Layouts: `block_q4_K` and its like in ggml-common.h.
"""

from __future__ import annotations

import numpy as np

from ryzanstein.worker.checkpoints.gguf.small_blocks import IQ4_VALUES, Bytes, Numbers, half, nibbles

_TWO_BITS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_ONE_BIT = np.arange(8, dtype=np.uint8)[:, None]
_POWERS_OF_3 = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def q2_k(blocks: Bytes) -> Numbers:
    scales, values = blocks[:, :16], _pairs_of_bits(blocks[:, 16:80], 32).reshape(-1, 16, 16)
    steps = half(blocks[:, 80:82]) * (scales & 15).astype(np.float32)
    lowest = half(blocks[:, 82:84]) * (scales >> 4).astype(np.float32)
    return (steps[:, :, None] * values.astype(np.float32) - lowest[:, :, None]).reshape(-1, 256)


def q3_k(blocks: Bytes) -> Numbers:
    """A bit of the mask that is not set takes 4 from a number of two bits."""
    masks = (blocks[:, None, :32] >> _ONE_BIT & np.uint8(1)).reshape(-1, 256).astype(np.float32)
    values = _pairs_of_bits(blocks[:, 32:96], 32).reshape(-1, 256).astype(np.float32) + (masks - 1) * 4
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8]) | _pairs_of_bits(packed[:, 8:], 4).reshape(-1, 16) << np.uint8(4)
    steps = half(blocks[:, 108:110]) * (scales.astype(np.float32) - 32)
    return (steps[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Numbers:
    return _scaled(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def q5_k(blocks: Bytes) -> Numbers:
    highest = (blocks[:, None, 16:48] >> _ONE_BIT & np.uint8(1)) << np.uint8(4)
    return _scaled(blocks, nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | highest)


def q6_k(blocks: Bytes) -> Numbers:
    lower = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    values = lower | _pairs_of_bits(blocks[:, 128:192], 32).reshape(-1, 256) << np.uint8(4)
    steps = half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (steps[:, :, None] * (values.astype(np.float32) - 32).reshape(-1, 16, 16)).reshape(-1, 256)


def iq4_xs(blocks: Bytes) -> Numbers:
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = lower | _pairs_of_bits(blocks[:, 2:4], 1).reshape(-1, 8) << np.uint8(4)
    steps = half(blocks[:, :2]) * (scales.astype(np.float32) - 32)
    values = IQ4_VALUES[nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    numbers: Numbers = (steps[:, :, None] * values).reshape(-1, 256)
    return numbers


def tq1_0(blocks: Bytes) -> Numbers:
    """Five numbers of {-1, 0, 1} are a byte's fraction of 256, in base 3."""
    parts = (
        (blocks[:, None, :32], _POWERS_OF_3),
        (blocks[:, None, 32:48], _POWERS_OF_3),
        (blocks[:, None, 48:52], _POWERS_OF_3[:4]),
    )
    fractions = np.concatenate([(part * powers).reshape(len(blocks), -1) for part, powers in parts], axis=-1)
    digits: Numbers = fractions.astype(np.uint16) * 3 // 256 - np.float32(1)
    numbers: Numbers = half(blocks[:, 52:54]) * digits
    return numbers


def tq2_0(blocks: Bytes) -> Numbers:
    return half(blocks[:, 64:66]) * (_pairs_of_bits(blocks[:, :64], 32).reshape(-1, 256).astype(np.float32) - 1)


def unpack_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Returns the eight 6-bit scales [B, 8] and offsets [B, 8] that Q4_K and Q5_K pack in 12 bytes."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=-1)
    offsets = np.concatenate([middle & 63, high >> 4 | (middle >> 2 & 48)], axis=-1)
    return scales, offsets


def _scaled(blocks: Bytes, values: Bytes) -> Numbers:
    """Returns the numbers of a Q4_K or Q5_K block of unpacked values."""
    scales, offsets = unpack_scales(blocks[:, 4:16])
    steps = half(blocks[:, :2]) * scales.astype(np.float32)
    lowest = half(blocks[:, 2:4]) * offsets.astype(np.float32)
    return (steps[:, :, None] * values.reshape(-1, 8, 32).astype(np.float32) - lowest[:, :, None]).reshape(-1, 256)


def _pairs_of_bits(stored: Bytes, run: int) -> Bytes:
    """Returns the two lowest bits of each run of bytes, then the next two, ...; then the next run."""
    return stored.reshape(len(stored), -1, 1, run) >> _TWO_BITS & np.uint8(3)
