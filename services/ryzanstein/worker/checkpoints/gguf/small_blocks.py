"""Unpacks blocks of 32 numbers: a scale, sometimes an offset, and 4 to 8 bits for each number.

Each function takes blocks [B, bytes] of uint8 and returns numbers [B, 32] of float32. The order of
operations is ggml's, so that the bits are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.float32]]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The values of the 16 codes of IQ4_NL and IQ4_XS."""
_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 16 codes of a 4-bit float: ggml halves the scale instead."""


def half(stored: Bytes) -> Numbers:
    """Returns 16-bit floats [B, 2 n] bytes as [B, n] numbers."""
    return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)


def nibbles(stored: Bytes) -> Bytes:
    """Returns the lower four bits of all bytes of the last dimension, then the upper ones."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def q4_0(blocks: Bytes) -> Numbers:
    return half(blocks[:, :2]) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: Bytes) -> Numbers:
    return half(blocks[:, :2]) * nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks[:, 2:4])


def q5_0(blocks: Bytes) -> Numbers:
    return half(blocks[:, :2]) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32) - 16)


def q5_1(blocks: Bytes) -> Numbers:
    return half(blocks[:, :2]) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32) + half(blocks[:, 2:4])


def q8_0(blocks: Bytes) -> Numbers:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * half(blocks[:, :2])


def iq4_nl(blocks: Bytes) -> Numbers:
    return half(blocks[:, :2]) * IQ4_VALUES[nibbles(blocks[:, 2:])]


def mxfp4(blocks: Bytes) -> Numbers:
    return _half_power(blocks[:, :1]) * _E2M1_VALUES[nibbles(blocks[:, 1:])]


def _five_bits(highest: Bytes, lower: Bytes) -> Bytes:
    return nibbles(lower) | np.unpackbits(highest, axis=-1, bitorder="little") << np.uint8(4)


def _half_power(exponent: Bytes) -> Numbers:
    """Returns half of 2 ** (exponent - 127), the scale of MXFP4; the two smallest are subnormal."""
    wide = exponent.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x200000) << np.minimum(wide, 1), (np.maximum(wide, 1) - 1) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)
