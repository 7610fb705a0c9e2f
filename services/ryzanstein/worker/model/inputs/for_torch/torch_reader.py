"""Keys that torch's attention reads: views of adjacent slots, or copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ryzanstein.worker.cache.staging import GPU_VIEW_BYTES
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.attention import Segment, Span
from ryzanstein.worker.model.inputs.for_torch.batches import DecodeBatches
from ryzanstein.worker.model.inputs.layout import FedTokens, PageTables
from ryzanstein.worker.model.inputs.paged import SeenKeys
from ryzanstein.worker.model.inputs.step import GroupInputs

# Size of one sequence's keys and values from which a view is faster for a single new token than a
# padded batch: a view costs a call of its own, a batch costs a copy. Threads share the copy but not
# the calls.
_VIEW_BYTES = 96 * 2**10
_VIEW_BYTES_THREADS = 384 * 2**10


def fastest_view(slot_bytes: int, num_threads: int, *, on_gpu: bool = False) -> int:
    """Returns the best `view_keys` for a cache with `slot_bytes` per token and layer."""
    on_cpu = _VIEW_BYTES if num_threads == 1 else _VIEW_BYTES_THREADS
    return (GPU_VIEW_BYTES if on_gpu else on_cpu) // slot_bytes


@dataclass(frozen=True, slots=True)
class TorchReader:
    """A reader for torch, which knows no block tables.

    `view_keys`: a single new token with at least that many keys in adjacent slots is not batched,
    unless the batch can be staged. `knows_causal`: scores have no cap, so that a whole prompt needs
    no mask. `on_gpu`: so many keys are not batched either where their slots are apart, because a batch is as
    large as its longest sequence, and a GPU has less memory.
    """

    batches: DecodeBatches
    window: int | None
    view_keys: int
    knows_causal: bool
    on_gpu: bool = False

    def inputs(self, plan: StepPlan, fed: FedTokens, tables: PageTables) -> GroupInputs:
        layout = self.batches.layout
        keys = SeenKeys.of(fed, tables, self.window, layout.block_size)
        return GroupInputs(layout.tensor(keys.new_slots(fed, layout)), self._segments(keys))

    def _segments(self, keys: SeenKeys) -> list[Segment]:
        single_S, adjacent_S = keys.num_new_S == 1, keys.adjacent(self.batches.layout.block_size)
        staging = self.batches.staging_for(keys, single_S)
        viewed_S = (adjacent_S | self.on_gpu) & (keys.length_S - keys.begin_S >= self.view_keys)
        together_S = single_S if staging is not None else single_S & ~viewed_S
        together = np.flatnonzero(together_S)
        alone_S = ~together_S if len(together) > 1 else np.ones_like(together_S)
        spans: list[Segment] = [self._span(keys, s, bool(adjacent_S[s])) for s in np.flatnonzero(alone_S).tolist()]
        return [*spans, self.batches.batch(keys, together, staging)] if len(together) > 1 else spans

    def _span(self, keys: SeenKeys, s: int, adjacent: bool) -> Span:
        first, num_new, masks = int(keys.first_S[s]), int(keys.num_new_S[s]), self.batches.masks
        is_whole = num_new > 1 and num_new == keys.length_S[s] and keys.window is None and masks.bias is None
        causal = is_whole and self.knows_causal
        return Span(first, num_new, self._slots(keys, s, adjacent), None if causal else masks.of_sequence(keys, s), causal)

    def _slots(self, keys: SeenKeys, s: int, adjacent: bool) -> slice | Tensor:
        begin, end, layout = int(keys.begin_S[s]), int(keys.length_S[s]), self.batches.layout
        if adjacent:
            block = begin // layout.block_size
            first_slot = (int(keys.table_SB[s, block]) - block) * layout.block_size
            return slice(first_slot + begin, first_slot + end)
        return layout.tensor(layout.slots(keys.table_SB, np.array(s), np.arange(begin, end)))
