"""Rotary position embedding (Su et al. 2021): query and key halves are rotated by angles that grow with the position.

Legend: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ryzanstein.worker.model.architectures.spec import LinearScaling, Llama3Scaling, RotarySpec


class Rotary:
    """Angles are computed once a step, for the step's positions; a table for a long context would not be small."""

    def __init__(self, spec: RotarySpec, head_dim: int, device: torch.device) -> None:
        # Repeated before it moves: on the meta device `repeat` imports sympy, a second of every start.
        self._frequencies_D = inverse_frequencies(spec, head_dim).repeat(2).to(device)

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [T, 1, D] each; the sine is signed so that `rotate` needs no negation."""
        angles_T1D = (positions_T.float().unsqueeze(1) * self._frequencies_D).unsqueeze(1)
        sin_T1D = angles_T1D.sin()
        sin_T1D[..., : sin_T1D.shape[-1] // 2].neg_()
        return angles_T1D.cos().to(dtype), sin_T1D.to(dtype)


def rotate(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> None:
    """Rotates in place: each half becomes itself times cosine plus the other half times the signed sine."""
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    x_THD.mul_(cos_T1D).addcmul_(swapped_THD, sin_T1D)


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> Tensor:
    """Radians per position for each pair of a head, [D / 2] in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if isinstance(spec.scaling, LinearScaling):
        return frequencies / spec.scaling.factor
    if isinstance(spec.scaling, Llama3Scaling):
        return _llama3(frequencies, spec.scaling)
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: `turns` of the original context decide; below low_freq_factor divided, above high_freq_factor kept."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
