"""Levels of a few bits, packed one after the other, lowest bits first.

Legend: R rows, W words of 32 bits, N levels of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTHS = (2, 3, 4, 8)
"""The numbers of bits that are read."""
WORD_BITS = 32
_BYTE = 8


def words_of(num_levels: int, bits: int) -> int:
    """Returns the number of words that levels take."""
    return -(-num_levels * bits // WORD_BITS)


def first_whole(start: int, bits: int) -> int:
    """Returns the last level at or before `start` that begins a word."""
    period = WORD_BITS if bits == 3 else WORD_BITS // bits
    return start // period * period


def unpack(words_RW: Tensor, bits: int) -> Tensor:
    """Returns all levels of the words, [R, N] uint8. With 3 bits three bytes have eight levels.

    What is left of the last unit is filled up with zeros.
    """
    bytes_RB = words_RW.contiguous().view(torch.uint8)
    if bits == _BYTE:
        return bytes_RB
    per_unit = 3 if bits == 3 else 1
    bytes_RB = F.pad(bytes_RB, (0, -bytes_RB.shape[1] % per_unit))
    units = bytes_RB.view(len(bytes_RB), -1, per_unit)
    numbers = units[..., 0] if per_unit == 1 else (units.int() << torch.tensor([0, 8, 16], dtype=torch.int32)).sum(-1)
    shifts = torch.arange(0, per_unit * _BYTE, bits, dtype=numbers.dtype)
    levels = (numbers.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return levels.flatten(1).to(torch.uint8)
