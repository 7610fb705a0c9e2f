"""Keys that our own kernels read in place, through block tables."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions
from ryzanstein.worker.kernels.functions.paged_keys import ColdKeys, PagedKeys, SparseKeys
from ryzanstein.worker.model.alibi import AlibiBias
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.inputs.fed import FedTokens, PageTables
from ryzanstein.worker.model.inputs.layout import CacheLayout
from ryzanstein.worker.model.inputs.seen_keys import SeenKeys
from ryzanstein.worker.model.inputs.step import GroupInputs


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
