"""Keys of a group with a rule of sparse attention: its tables begin with lasting pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ryzanstein.worker.engine.extents import Extents, Lasting
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.attention import SparseKeys
from ryzanstein.worker.model.inputs.layout import FedTokens, Integers, PageTables
from ryzanstein.worker.model.inputs.paged import PagedSegments, SeenKeys
from ryzanstein.worker.model.inputs.step import Bounding, GroupInputs
from ryzanstein.worker.settings.sparse import SparseRule


@dataclass(frozen=True, slots=True)
class SparseReader:
    """A reader by a rule. `lasting` are the pages that stay when they leave the window."""

    segments: PagedSegments
    rule: SparseRule
    lasting: Lasting | None
    extents: Extents

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        layout, rule = self.segments.layout, self.rule
        slots_T = self._slots(fed, tables)
        keys = SeenKeys.of(fed, tables, rule.window, layout.block_size)
        sparse = None if keys.window is None else SparseKeys(self.extents.pages(rule.sinks), rule.stride, rule.quest)
        segment = self.segments.of(keys, sparse=sparse)
        return GroupInputs(layout.tensor(slots_T), [segment], bounding=self._bounding(fed, slots_T))

    def _slots(self, fed: FedTokens, tables: PageTables) -> Integers:
        size, firsts = self.segments.layout.block_size, tables.first_S.tolist()
        num_S = np.array([self.extents.num_lasting(self.lasting, first) for first in firsts], np.int64)
        offset_S = (num_S - tables.first_S) * size
        return self.segments.layout.slots(tables.table_SB, fed.sequence_T, fed.position_T + offset_S[fed.sequence_T])

    def _bounding(self, fed: FedTokens, slots_T: Integers) -> Bounding | None:
        size = self.segments.layout.block_size
        blocks_M = slots_T[fed.position_T % size == size - 1] // size
        return Bounding(self.segments.layout.tensor(blocks_M), size) if self.rule.quest and len(blocks_M) else None
