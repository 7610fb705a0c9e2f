"""A random draw in plain numbers, shared by torch (`truncation.py`) and our own kernels (`draw.c`).

A token's weight is 2^(bits + (logit - greatest logit) * rate), rounded to a whole number. Sums of
weights are exact in any order, so that every implementation cuts and draws at the same token. A
token that is 2^-(bits + 1) times as likely as the likeliest one has weight 0: 2^-46 times for a
vocabulary of 131,072.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from ryzanstein.generation.sampling import SamplingParams

_MOST_BITS = 50  # float64 has 52 bits after the leading one


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw of one row of a batch of logits.

    `top_k` 0 keeps all tokens. `least` is the smallest weight that may be drawn. `rate` is in
    doublings of the weight per logit. `uniform` is in [0, 1).
    """

    row: int
    bits: int
    top_k: int
    least: int
    rate: float
    top_p: float
    uniform: float

    @classmethod
    def of(cls, row: int, sampling: SamplingParams, vocab_size: int, uniform: float) -> Draw:
        """Returns the draw of a row. `sampling` must have a temperature greater than 0."""
        bits = weight_bits(vocab_size)
        rate = min(1 / (sampling.temperature * math.log(2)), sys.float_info.max)
        top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        return cls(row, bits, top_k, math.ceil(sampling.min_p * 2**bits), rate, sampling.top_p, uniform)


def weight_bits(vocab_size: int) -> int:
    """Returns the bits of a weight, so that the sum of all weights stays below 2^63."""
    return min(_MOST_BITS, 62 - (vocab_size - 1).bit_length())
