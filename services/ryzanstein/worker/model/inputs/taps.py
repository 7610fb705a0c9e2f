"""The slots that short convolutions read: those of the last few tokens before each new one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens, PageTables
from ryzanstein.worker.model.inputs.step import GroupInputs


@dataclass(frozen=True, slots=True)
class TapsReader:
    """A reader for convolutions of `length` tokens. Before a sequence's first token there are zeros."""

    layout: CacheLayout
    length: int

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        layout, sequence_T = self.layout, fed.sequence_T
        origin_T = (tables.first_S * layout.block_size)[sequence_T]
        slots_T = layout.slots(tables.table_SB, sequence_T, fed.position_T - origin_T)
        back_L1 = np.arange(self.length - 1, 0, -1)[:, None]
        exists_LT = fed.position_T >= back_L1
        position_LT = np.where(exists_LT, fed.position_T - back_L1 - origin_T, 0)
        taps_LT = np.where(exists_LT, layout.slots(tables.table_SB, sequence_T, position_LT), layout.zero_slot)
        return GroupInputs(layout.tensor(slots_T), [], taps_LT=layout.tensor(taps_LT))
