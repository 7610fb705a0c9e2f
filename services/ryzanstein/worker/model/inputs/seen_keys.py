"""Which keys of each sequence the layers of a group read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.model.inputs.fed import FedTokens, PageTables
from ryzanstein.worker.model.inputs.layout import CacheLayout, Integers


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The keys that a group reads: positions `begin_S` to `length_S` of each sequence.

    They are counted from `origin_S`. `window` is None where no sequence is longer than it.
    """

    window: int | None
    table_SB: Integers
    origin_S: Integers
    first_S: Integers  # row of T
    num_new_S: Integers
    begin_S: Integers
    length_S: Integers

    @classmethod
    def of(cls, fed: FedTokens, tables: PageTables, window: int | None, block_size: int) -> Self:
        origin_S, whole_S = tables.first_S * block_size, fed.context_S + fed.num_new_S
        narrow = window if window is not None and window < whole_S.max() else None
        begin_S = np.zeros_like(origin_S) if narrow is None else np.maximum(0, fed.context_S + 1 - narrow) - origin_S
        return cls(narrow, tables.table_SB, origin_S, fed.first_S, fed.num_new_S, begin_S, whole_S - origin_S)

    def new_slots(self, fed: FedTokens, layout: CacheLayout) -> Integers:
        """Returns the slots of the step's own keys."""
        return layout.slots(self.table_SB, fed.sequence_T, fed.position_T - self.origin_S[fed.sequence_T])

    def adjacent(self, block_size: int) -> npt.NDArray[np.bool_]:
        """Returns, for each sequence, whether its blocks in use are adjacent."""
        first_S, end_S = self.begin_S // block_size, -(-self.length_S // block_size)
        follows_SB = self.table_SB[:, 1:] == self.table_SB[:, :-1] + 1
        block_B = np.arange(1, self.table_SB.shape[1])
        unused_SB = (block_B <= first_S[:, None]) | (block_B >= end_S[:, None])
        return np.asarray((follows_SB | unused_SB).all(axis=1))
