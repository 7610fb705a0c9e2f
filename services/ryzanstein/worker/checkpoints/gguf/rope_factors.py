"""Llama 3's stretched wavelengths: three numbers in config.json, a factor per wavelength in GGUF."""

from __future__ import annotations

import math

import numpy as np

from ryzanstein.worker.architectures.spec import Llama3Scaling, PartScaling
from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers

_LOW, _HIGH = 1.0, 4.0
"""The two factors that bound the ramp. All known models have these."""
_CONTEXTS = (8192, *(2**power for power in range(5, 21) if power != 13))
_TOLERANCE = 1e-5


def rope_factors(scaling: Llama3Scaling, theta: float, dim: int) -> Numbers:
    """Returns by what each of `dim` / 2 frequencies is divided."""
    factors = []
    for index in range(0, dim, 2):
        turns = scaling.original_context / (2 * math.pi * theta ** (index / dim))
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        factors.append(1 / ((1 - kept) / scaling.factor + kept))
    return np.array(factors, np.float32)


UNROTATED = 1e29
"""A pair with a factor from here on does not rotate: llama.cpp's converter writes 1e30."""


def part_factors(scaling: PartScaling, dim: int) -> Numbers:
    """Returns the same of a scaling that leaves pairs as they are."""
    factors = np.full(dim // 2, 1e30, np.float32)
    factors[: scaling.num_pairs] = scaling.factor
    return factors


def scaling_of(factors: Numbers, theta: float, dim: int) -> Llama3Scaling | None:
    """Returns the scaling that has these factors, or None if it is not Llama 3's."""
    if factors.shape != (dim // 2,) or not np.all(np.isfinite(factors)):
        return None
    largest = float(str(factors.max()))
    for context in _CONTEXTS:
        scaling = Llama3Scaling(largest, _LOW, _HIGH, context)
        if largest > 0 and np.allclose(rope_factors(scaling, theta, dim), factors, rtol=_TOLERANCE, atol=0):
            return scaling
    return None
