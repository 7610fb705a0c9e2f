"""Chooses how each group of a model's layers reads its keys."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.cache.zones import Zones
from ryzanstein.worker.engine.extents import Extents, Windows
from ryzanstein.worker.model.inputs.batches import DecodeBatches
from ryzanstein.worker.model.inputs.builder import GroupReader
from ryzanstein.worker.model.inputs.paged import PagedReader, PagedSegments
from ryzanstein.worker.model.inputs.sparse import SparseReader
from ryzanstein.worker.model.inputs.torch_reader import TorchReader
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
