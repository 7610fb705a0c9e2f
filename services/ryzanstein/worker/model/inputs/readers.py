"""Chooses how each group of a model's layers reads its keys, or the last few tokens that a short convolution adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ryzanstein.worker.cache.zones import Zones
from ryzanstein.worker.engine.extents import Extents, Windows
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.inputs.builder import GroupReader
from ryzanstein.worker.model.inputs.for_torch.batches import DecodeBatches
from ryzanstein.worker.model.inputs.for_torch.torch_reader import TorchReader
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens, PageTables
from ryzanstein.worker.model.inputs.paged import PagedReader, PagedSegments
from ryzanstein.worker.model.inputs.sparse import SparseReader
from ryzanstein.worker.model.inputs.step import GroupInputs
from ryzanstein.worker.model.inputs.zoned import ZonedReader
from ryzanstein.worker.settings.sparse import SparseRule


def paged_readers(
    segments: PagedSegments, extents: Extents, rules: Sequence[SparseRule | None], zones: Zones | None
) -> list[GroupReader]:
    """Returns readers with our own kernels. `rules` of sparse attention are for each group, or empty."""
    if zones is not None:
        return [ZonedReader(segments, window, zones) for window in extents.windows]
    found: list[GroupReader] = []
    for (window, lasting), rule in zip(extents.groups, rules or (None,) * len(extents.windows), strict=True):
        if rule is None:
            found.append(PagedReader(segments, window))
        else:
            found.append(SparseReader(segments, rule, lasting, extents))
    return found


def torch_readers(
    batches: DecodeBatches, windows: Windows, view_keys: int, *, knows_causal: bool, on_gpu: bool = False
) -> list[GroupReader]:
    """Returns readers for torch, which reads neither sparsely nor compressed blocks."""
    return [TorchReader(batches, window, view_keys, knows_causal, on_gpu) for window in windows]


def with_taps(readers: Sequence[GroupReader], layout: CacheLayout, taps: Sequence[int | None]) -> list[GroupReader]:
    """Returns the readers, with others for the groups of short convolutions; `taps` are their lengths, or empty."""
    lengths = taps or (None,) * len(readers)
    return [reader if length is None else TapsReader(layout, length) for reader, length in zip(readers, lengths, strict=True)]


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
