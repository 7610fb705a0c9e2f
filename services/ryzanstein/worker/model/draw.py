"""What a random draw is, in plain numbers: the same for torch (`truncation.py`) and for kernels of our own (`draw.c`).

A token's weight is 2^(bits + (logit - greatest logit) * rate), rounded to a whole number: sums of weights are exact in any
order, so that every implementation cuts and draws at the same token. A token that is 2^-(bits + 1) times as likely as the
likeliest one has no weight: 2^-46 times, for a vocabulary of 131,072.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from ryzanstein.generation import SamplingParams

_MOST_BITS = 50  # float64 has 52 for a power of two and what is added to it


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a batch of logits. `top_k` 0 keeps all; `least` is the least weight that may be drawn; `rate` is in doublings
    of the weight per logit; `uniform` is in [0, 1)."""

    row: int
    bits: int
    top_k: int
    least: int
    rate: float
    top_p: float
    uniform: float

    @classmethod
    def of(cls, row: int, sampling: SamplingParams, vocab_size: int, uniform: float) -> Draw:
        """`sampling` has a temperature greater than 0."""
        bits = weight_bits(vocab_size)
        rate = min(1 / (sampling.temperature * math.log(2)), sys.float_info.max)
        top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        return cls(row, bits, top_k, math.ceil(sampling.min_p * 2**bits), rate, sampling.top_p, uniform)


def weight_bits(vocab_size: int) -> int:
    """The sum of all weights must stay below 2^63."""
    return min(_MOST_BITS, 62 - (vocab_size - 1).bit_length())
