"""Rotary position embedding (Su et al. 2021).

Pairs of a query's or key's numbers are rotated by angles that grow with the position.

Legend: T tokens, H heads, R rotated numbers of a head, P = R / 2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    PartScaling,
    QueryGrowth,
    RotarySpec,
    YarnScaling,
)
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.program.ends import emit_angles
from ryzanstein.worker.model.program.ops import NotNative, Ops


class Rotary:
    """A rotary embedding that computes angles once per step, for the step's positions.

    A table for a long context would be large.
    """

    def __init__(self, spec: RotarySpec, device: torch.device, kernels: NativeKernels | None = None) -> None:
        self._interleaved, self._kernels, self._growth = spec.interleaved, kernels, spec.growth
        self._magnitude = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling | LongScaling) else 1.0
        frequencies_P = inverse_frequencies(spec)
        # Repeated before the move: `repeat` on the meta device imports sympy, which costs a second
        # at every start.
        repeated_R = frequencies_P.repeat_interleave(2) if spec.interleaved else frequencies_P.repeat(2)
        self._frequencies_R = repeated_R.to(device)

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> Angles:
        """Returns the cosine and signed sine of every token, and the growth of its query if there is one."""
        growth_T1 = None if self._growth is None else _grown(positions_T, self._growth).to(dtype)
        if self._kernels is not None:
            found = self._kernels.rotation.angles(positions_T, self._frequencies_R, self._interleaved, self._magnitude)
            return Angles(*found, self._interleaved, growth_T1)
        angles_T1R = (positions_T.float().unsqueeze(1) * self._frequencies_R).unsqueeze(1)
        cos_T1R, sin_T1R = angles_T1R.cos(), angles_T1R.sin()
        if self._magnitude != 1:
            cos_T1R, sin_T1R = cos_T1R * self._magnitude, sin_T1R * self._magnitude
        negative = sin_T1R[..., ::2] if self._interleaved else sin_T1R[..., : sin_T1R.shape[-1] // 2]
        negative.neg_()
        return Angles(cos_T1R.to(dtype), sin_T1R.to(dtype), self._interleaved, growth_T1)

    def emit(self, ops: Ops, number: int) -> None:
        """Adds the angles of every token as those of rotary embedding `number`. Raises NotNative."""
        if self._growth is not None:
            raise NotNative("queries that grow")
        emit_angles(ops, number, self._frequencies_R, interleaved=self._interleaved, magnitude=self._magnitude)


def _grown(positions_T: Tensor, growth: QueryGrowth) -> Tensor:
    """Returns the factor of each query, [T, 1] in float64.

    torch's logarithm may have another last bit at the end of the range that a thread computes; float32
    does not show it.
    """
    whole_T1 = (positions_T // growth.interval).double().unsqueeze(1)
    return 1 + growth.rate * torch.log1p(whole_T1)


def new_rotation(kernels: NativeKernels | None) -> Callable[[Tensor, Angles], None]:
    """Returns our own kernel for `rotate` if there is one, else `rotate`."""
    return rotate if kernels is None else kernels.rotation.rotate


def rotate(x_THD: Tensor, angles: Angles) -> None:
    """Rotates the first R numbers of each head in place.

    A number becomes itself times the cosine plus its partner times the signed sine.
    """
    num_rotated = angles.cos_T1R.shape[-1]
    x_THR = x_THD[..., :num_rotated]
    if angles.interleaved:
        partner_THR = x_THR.reshape(*x_THR.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner_THR = x_THR.roll(num_rotated // 2, dims=-1)
    x_THR.mul_(angles.cos_T1R).addcmul_(partner_THR, angles.sin_T1R)


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """Returns the radians per position for each pair of a head, [P] in float32."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    frequencies = 1.0 / (spec.theta**exponents)
    scaling = spec.scaling
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, PartScaling):
        return torch.where(torch.arange(len(frequencies)) < scaling.num_pairs, frequencies / scaling.factor, 0.0)
    if isinstance(scaling, LongScaling):
        return 1.0 / (torch.tensor(scaling.factors) * spec.theta**exponents)
    if isinstance(scaling, Llama3Scaling):
        return _between(frequencies, _llama3_kept(frequencies, scaling), scaling.factor)
    if isinstance(scaling, YarnScaling):
        return _between(frequencies, _yarn_kept(spec, scaling), scaling.factor)
    return frequencies


def _between(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Returns the frequencies: unchanged where `kept` is 1, divided by `factor` where it is 0."""
    return kept * frequencies + (1 - kept) * frequencies / factor


def _llama3_kept(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Returns `kept` for Llama 3.1, which depends on a frequency's `turns` in the original context.

    Below low_freq_factor turns a frequency is divided, above high_freq_factor it is kept.
    """
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return ramp.clamp(0, 1)


def _yarn_kept(spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    """Returns `kept` for YaRN: a ramp over pairs.

    It runs from the pair with beta_fast turns in the original context to the pair with beta_slow.
    """

    def pair(turns: float) -> float:
        return spec.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_dimensions:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    return 1 - ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
