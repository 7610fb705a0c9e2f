"""Keys that our own kernels read in place, through block tables.
And which keys of each sequence the layers of a group read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions, ColdKeys, PagedKeys, SparseKeys
from ryzanstein.worker.model.alibi import AlibiBias
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens, Integers, PageTables
from ryzanstein.worker.model.inputs.step import GroupInputs


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


@dataclass(frozen=True, slots=True)
class PagedSegments:
    """A maker of the one segment that all sequences are. `bias` is added to the scores."""

    functions: AttentionFunctions
    layout: CacheLayout
    bias: AlibiBias | None = None

    def of(self, keys: SeenKeys, cold: ColdKeys | None = None, sparse: SparseKeys | None = None) -> Paged:
        length_S, block_size = keys.length_S + keys.origin_S, self.layout.block_size
        found = (keys.first_S, keys.num_new_S, keys.table_SB, length_S, keys.origin_S // block_size)
        rows_S, num_new_S, tables_SB, lengths_S, first_S = map(self.layout.tensor, found)
        bias_HP = None if self.bias is None else self.bias.up_to(int(length_S.max()))
        numbers = (block_size, keys.window, bias_HP)
        paged = PagedKeys(rows_S, num_new_S, tables_SB, lengths_S, *numbers, first_S=first_S, cold=cold, sparse=sparse)
        return Paged(self.functions, paged)


@dataclass(frozen=True, slots=True)
class PagedReader:
    """A reader of all keys, or of those in a window."""

    segments: PagedSegments
    window: int | None

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        layout = self.segments.layout
        keys = SeenKeys.of(fed, tables, self.window, layout.block_size)
        return GroupInputs(layout.tensor(keys.new_slots(fed, layout)), [self.segments.of(keys)])
