"""Ternary matrices: levels -1, 0 and 1, and one scale (BitNet b1.58, Ma et al. 2024).

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.grids import GridMatrix

_EXACT = 1e-3


def ternary(weight_OI: Tensor) -> GridMatrix:
    """Returns the matrix rounded as BitNet's training does it, by its mean magnitude.

    Weights that are ternary already, as a dequantized model's are, keep their own scale: their mean
    magnitude is smaller than it.
    """
    mean = weight_OI.abs().mean().clamp_min(torch.finfo(torch.float32).tiny)
    levels_OI = (weight_OI / mean).round_().clamp_(-1, 1)
    if is_ternary(weight_OI):
        mean = (weight_OI * levels_OI).sum() / levels_OI.square().sum().clamp_min(1)
    return GridMatrix(levels_OI.to(torch.int8), mean.expand(len(weight_OI), 1).contiguous(), None)


def is_ternary(weight_OI: Tensor) -> bool:
    """Returns whether all weights have one magnitude or none."""
    magnitude_OI = weight_OI.abs()
    largest = magnitude_OI.max()
    return bool(((magnitude_OI <= _EXACT * largest) | (magnitude_OI >= (1 - 8 * _EXACT) * largest)).all())
