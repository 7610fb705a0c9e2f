"""A staging area for keys and values of a decode batch: all its sequences become one strided view.

Gathering them from their blocks in every step moves each key three times. Here they are gathered
when the batch changes; in every other step each sequence adds only its newest key. The staging area
follows the blocks of each layer, so that a step fills it from the blocks with one indexed copy. The
decision is made once per step for all layers: all of them must attend to all keys.

Legend: S sequences, B blocks of the longest table, P keys of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

GPU_VIEW_BYTES = 8 * 2**20
"""On a GPU, where a call takes as long as a copy of megabytes, sequences are copied together up to this size each."""
BUDGET_BYTES = 64 * 2**20
_GROWTH = 64  # keys; a stride longer than needed saves gathering the batch again in every step
_MOST_PADDING = 2.0  # padded keys to real ones; above it, the sequences are faster one by one


@dataclass(frozen=True, slots=True)
class StagedSequence:
    """The place of a batch: sequence s has its key of position p in `first_slot + s * stride + p`.

    `fresh`: all keys must be copied there.
    """

    first_slot: int
    stride: int
    fresh: bool


class Staging:
    """A staging area of `num_slots` slots that remembers which batch the last step left in it."""

    def __init__(self, first_slot: int, num_slots: int, block_size: int) -> None:
        self._first_slot, self._num_slots, self._block_size = first_slot, num_slots, block_size
        self._table_SB: Integers = np.zeros((0, 0), np.int64)
        self._length_S: Integers = np.zeros(0, np.int64)
        self._stride = 0

    def fits(self, length_S: Integers) -> bool:
        """Returns whether sequences of `length_S` keys, new ones included, can be staged together.

        They must fit, and must not need too much padding.
        """
        longest = int(length_S.max())
        padding = len(length_S) * longest / int(length_S.sum())
        return padding <= _MOST_PADDING and len(length_S) * _stride(longest) <= self._num_slots

    def place(self, table_SB: Integers, length_S: Integers) -> StagedSequence:
        """Returns the place of a batch that fits.

        Every step with a batch must call this, or the next batch counts as a different one.
        """
        longest = int(length_S.max())
        fresh = not (self._continues(table_SB, length_S) and longest <= self._stride)
        if fresh:
            self._stride = _stride(longest)
        self._table_SB, self._length_S = table_SB, length_S
        return StagedSequence(self._first_slot, self._stride, fresh)

    def forget(self) -> None:
        """Discards what `place` remembers, because a step ended before it copied everything."""
        self._length_S = np.zeros(0, np.int64)
        self._table_SB = np.zeros((0, 0), np.int64)

    def _continues(self, table_SB: Integers, length_S: Integers) -> bool:
        """Returns whether each sequence has one key more than before, and still the same blocks.

        Blocks that are not full are never shared, and full blocks never change: sequences with the
        same blocks have the same keys.
        """
        known_SB = self._table_SB
        width = known_SB.shape[1]
        if len(known_SB) != len(table_SB) or width > table_SB.shape[1] or (length_S != self._length_S + 1).any():
            return False
        unused_SB = np.arange(width) * self._block_size >= self._length_S[:, None]
        return bool(((table_SB[:, :width] == known_SB) | unused_SB).all())


def staging_slots(num_layers: int, slot_bytes: int, num_cache_slots: int) -> int:
    """Returns the number of staging slots in each layer.

    They stay within the budget for all layers, and are never more than the slots of the cache.
    """
    return min(num_cache_slots, BUDGET_BYTES // (num_layers * slot_bytes))


def _stride(longest: int) -> int:
    return -(-(longest + 1) // _GROWTH) * _GROWTH
