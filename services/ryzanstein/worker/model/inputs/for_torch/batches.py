"""Sequences with one new token each, as one padded batch for torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ryzanstein.worker.cache.staging import StagedSequence, Staging
from ryzanstein.worker.model.attention import AttentionBatch, Staged
from ryzanstein.worker.model.inputs.for_torch.masks import ScoreMasks
from ryzanstein.worker.model.inputs.layout import CacheLayout, Integers
from ryzanstein.worker.model.inputs.paged import SeenKeys


@dataclass(frozen=True, slots=True)
class DecodeBatches:
    """A maker of batches, whose keys are copied from their slots or staged."""

    layout: CacheLayout
    masks: ScoreMasks
    staging: Staging | None = None

    def staging_for(self, keys: SeenKeys, single_S: npt.NDArray[np.bool_]) -> Staging | None:
        """Returns the staging area if there is one and the step's single tokens can use it."""
        if self.staging is None or single_S.sum() < 2:
            return None
        return self.staging if self.staging.fits(keys.length_S[single_S]) else None

    def batch(self, keys: SeenKeys, together: Integers, staging: Staging | None) -> AttentionBatch:
        """Returns the batch of the sequences `together`."""
        length_S1, begin_S1 = keys.length_S[together, None], keys.begin_S[together, None]
        position_SP = begin_S1 + np.arange((length_S1 - begin_S1).max())
        whole_step = len(together) == len(keys.table_SB)
        slots_N, staged = self._to_read(keys, together, position_SP, staging)
        return AttentionBatch(
            rows_S=None if whole_step else self.layout.tensor(keys.first_S[together]),
            num_sequences=len(together),
            slots_N=self.layout.tensor(slots_N),
            mask=self.masks.of_batch(position_SP >= length_S1, position_SP + keys.origin_S[together, None]),
            staged=staged,
        )

    def _to_read(
        self, keys: SeenKeys, together: Integers, position_SP: Integers, staging: Staging | None
    ) -> tuple[Integers, Staged | None]:
        """Returns the slots of a batch's keys, flat: all, or those that are not staged yet."""
        if staging is None:
            return self._padded_slots(keys, together, position_SP), None
        length_S = keys.length_S[together]
        place = staging.place(keys.table_SB[together], length_S)
        if place.fresh:
            position_1P = np.arange(place.stride)[None]
            to_N = place.first_slot + np.arange(len(together) * place.stride)
            return self._padded_slots(keys, together, position_1P), self._staged(place, to_N)
        to_S = place.first_slot + np.arange(len(together)) * place.stride + length_S - 1
        return self.layout.slots(keys.table_SB, together, length_S - 1), self._staged(place, to_S)

    def _staged(self, place: StagedSequence, to_N: Integers) -> Staged:
        return Staged(place.first_slot, place.stride, self.layout.tensor(to_N))

    def _padded_slots(self, keys: SeenKeys, together: Integers, position_SP: Integers) -> Integers:
        """Returns the slots of positions, flat. Positions beyond a sequence's end are padding."""
        absent_SP = position_SP >= keys.length_S[together, None]
        present_SP = np.where(absent_SP, 0, position_SP)
        slots_SP = self.layout.slots(keys.table_SB, together[:, None], present_SP)
        return np.where(absent_SP, self.layout.zero_slot, slots_SP).reshape(-1)
