"""A random draw in plain numbers, shared by torch (`truncation.py`) and our own kernels (`draw.c`).

A token's weight is 2^(bits + (logit - greatest logit) * rate), rounded to a whole number. Sums of
weights are exact in any order, so that every implementation cuts and draws at the same token. A
token that is 2^-(bits + 1) times as likely as the likeliest one has weight 0: 2^-46 times for a
vocabulary of 131,072.

The random numbers are those of Philox4x32-10, a counter-based generator (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"). A draw is a pure function of key and counter: a
token's draw is the same on any node, in any batch, and after any failover.

Legend: S rows.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ryzanstein.generation.request import SamplingParams

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

Words = npt.NDArray[np.uint32]


def philox4x32(counter_S4: Words, key_S2: Words) -> Words:
    """Applies ten rounds to each row and returns [S, 4] words of 32 random bits."""
    c0, c1, c2, c3 = (counter_S4[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = key_S2[:, 0].copy(), key_S2[:, 1].copy()
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
        k0 += _WEYL[0]
        k1 += _WEYL[1]
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seeds: list[int], choices: list[int], indices: list[int]) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) with 53 random bits for each row.

    The key is the seed (64 bits), the counter is (index, choice, 0, 0).
    """
    seed_S = np.array(seeds, np.uint64)
    key_S2 = np.stack([seed_S & _LOW_WORD, seed_S >> _WORD_BITS], axis=1).astype(np.uint32)
    counter_S4 = np.zeros((len(seeds), 4), np.uint32)
    counter_S4[:, 0] = indices
    counter_S4[:, 1] = choices
    words_S4 = philox4x32(counter_S4, key_S2).astype(np.uint64)
    bits_S = (words_S4[:, 0] >> np.uint64(5)) << np.uint64(26) | words_S4[:, 1] >> np.uint64(6)
    return np.asarray(bits_S * 2.0**-53)


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
