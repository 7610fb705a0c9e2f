"""Keys of a group whose blocks are compressed: new tokens go to hot pages."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.cache.zones import Zones
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.attention import ColdKeys
from ryzanstein.worker.model.inputs.layout import FedTokens, PageTables
from ryzanstein.worker.model.inputs.paged import PagedSegments, SeenKeys
from ryzanstein.worker.model.inputs.step import GroupInputs, Sealing


@dataclass(frozen=True, slots=True)
class ZonedReader:
    """A reader of both zones. The group's own tables are those of its compressed blocks."""

    segments: PagedSegments
    window: int | None
    zones: Zones

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        layout, zones = self.segments.layout, self.zones
        hot = PageTables.of(plan.hot_tables, plan.hot_first)
        keys = SeenKeys.of(fed, hot, self.window, layout.block_size)
        cold = ColdKeys(layout.tensor(tables.table_SB), zones.layout, zones.hot_tokens, layout.tensor(tables.first_S))
        slots_T = layout.tensor(keys.new_slots(fed, layout))
        return GroupInputs(slots_T, [self.segments.of(keys, cold)], self._sealing(fed, hot, tables))

    def _sealing(self, fed: FedTokens, hot: PageTables, cold: PageTables) -> Sealing | None:
        """Returns the pages that this step fills, and the blocks into which they are compressed."""
        layout, size = self.segments.layout, self.segments.layout.block_size
        full_T = fed.position_T % size == size - 1
        sequence_M, page_M = fed.sequence_T[full_T], fed.position_T[full_T] // size
        if not len(page_M):
            return None
        hot_M, cold_M = (each.table_SB[sequence_M, page_M - each.first_S[sequence_M]] for each in (hot, cold))
        return Sealing(self.segments.functions, self.zones.layout, layout.tensor(hot_M), layout.tensor(cold_M))
