"""Where the keys and values of a decode batch lie side by side, so that all of its sequences are one strided view.

Gathering them from their blocks in every step moves each key three times. Here they are gathered when the batch changes; in
every other step each sequence adds its newest key only. The place is behind the blocks of each layer, so that a step fills it
from the blocks with one indexed copy. Decided once a step, for all layers alike: they must all see all keys.

Legend: S sequences, B blocks of the longest table, P keys of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

BUDGET_BYTES = 64 * 2**20
_GROWTH = 64  # keys; a longer stride than needed, so that the batch need not be gathered anew in every step
_MOST_PADDING = 2.0  # padded keys to real ones; beyond it sequences that differ too much are better served one by one


@dataclass(frozen=True, slots=True)
class StagedSequence:
    """Sequence s has its key of position p in slot `first_slot + s * stride + p`. `fresh`: all must be copied there."""

    first_slot: int
    stride: int
    fresh: bool


class Staging:
    """Remembers which batch the last step left in its place of `num_slots` slots."""

    def __init__(self, first_slot: int, num_slots: int, block_size: int) -> None:
        self._first_slot, self._num_slots, self._block_size = first_slot, num_slots, block_size
        self._table_SB: Integers = np.zeros((0, 0), np.int64)
        self._length_S: Integers = np.zeros(0, np.int64)
        self._stride = 0

    def fits(self, length_S: Integers) -> bool:
        """Whether sequences of so many keys, the new ones included, belong and fit in here together."""
        longest = int(length_S.max())
        padding = len(length_S) * longest / int(length_S.sum())
        return padding <= _MOST_PADDING and len(length_S) * _stride(longest) <= self._num_slots

    def place(self, table_SB: Integers, length_S: Integers) -> StagedSequence:
        """For a batch that fits. Each step with a batch must ask, or the batch counts as another one."""
        longest = int(length_S.max())
        fresh = not (self._continues(table_SB, length_S) and longest <= self._stride)
        if fresh:
            self._stride = _stride(longest)
        self._table_SB, self._length_S = table_SB, length_S
        return StagedSequence(self._first_slot, self._stride, fresh)

    def forget(self) -> None:
        """A step ended before it had copied everything: what lies here is not what `place` remembers."""
        self._length_S = np.zeros(0, np.int64)
        self._table_SB = np.zeros((0, 0), np.int64)

    def _continues(self, table_SB: Integers, length_S: Integers) -> bool:
        """Each sequence has one key more than before and still the blocks that it had. Blocks that are not full are never
        shared, and full ones never change: what has the same blocks has the same keys."""
        known_SB = self._table_SB
        width = known_SB.shape[1]
        if len(known_SB) != len(table_SB) or width > table_SB.shape[1] or (length_S != self._length_S + 1).any():
            return False
        unused_SB = np.arange(width) * self._block_size >= self._length_S[:, None]
        return bool(((table_SB[:, :width] == known_SB) | unused_SB).all())


def staging_slots(num_layers: int, slot_bytes: int, num_cache_slots: int) -> int:
    """How many slots behind the blocks of each layer: within the budget for all layers, and never more than the cache has."""
    return min(num_cache_slots, BUDGET_BYTES // (num_layers * slot_bytes))


def _stride(longest: int) -> int:
    return -(-(longest + 1) // _GROWTH) * _GROWTH
