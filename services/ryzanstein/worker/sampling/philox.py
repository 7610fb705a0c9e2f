"""Philox4x32-10, a counter-based generator of random numbers.

It is from Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3").
A draw is a pure function of key and counter: a token's draw is the same on any node, in any batch,
and after any failover.

Legend: S rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
