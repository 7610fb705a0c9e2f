"""A step's plan as tensors: token ids, positions, cache slots, and who looks at which keys. Built once, used by every layer.

Legend: T new tokens, S sequences, B blocks of the longest sequence, P padded keys, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.attention import Batch, Segment, Span

_VIEW_KEYS = 128  # a single new token with that many keys in adjacent blocks is quicker as a view than in a padded batch

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers read. `last_R` are the rows of T whose logits are wanted."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    last_R: Tensor
    segments: Sequence[Segment]


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """Turns plans into inputs for one cache geometry, device and dtype (masks are added to scores of that dtype)."""

    block_size: int
    device: torch.device
    dtype: torch.dtype

    def build(self, plan: StepPlan) -> StepInputs:
        """Raises ValueError where the plan contradicts itself."""
        num_new_S, context_S = np.array(plan.num_new, np.int64), np.array(plan.num_context, np.int64)
        first_S = np.cumsum(num_new_S) - num_new_S
        _check(plan, num_new_S, context_S, self.block_size)
        table_SB = _table(plan.block_tables)
        sequence_T = np.repeat(np.arange(len(num_new_S)), num_new_S)
        position_T = np.arange(len(plan.token_ids)) - (first_S - context_S)[sequence_T]
        slot_T = table_SB[sequence_T, position_T // self.block_size] * self.block_size + position_T % self.block_size
        sampled_R = np.array(plan.sampled, np.int64)
        return StepInputs(
            ids_T=self._tensor(np.array(plan.token_ids, np.int64)),
            positions_T=self._tensor(position_T),
            slots_T=self._tensor(slot_T),
            last_R=self._tensor((first_S + num_new_S - 1)[sampled_R]),
            segments=self._segments(table_SB, num_new_S, context_S + num_new_S, first_S),
        )

    def _segments(self, table_SB: Integers, num_new_S: Integers, length_S: Integers, first_S: Integers) -> list[Segment]:
        adjacent_S = _adjacent(table_SB, -(-length_S // self.block_size))
        alone_S = (num_new_S > 1) | (adjacent_S & (length_S >= _VIEW_KEYS))
        together = np.flatnonzero(~alone_S)
        if len(together) == 1:
            alone_S[together] = True
        spans: list[Segment] = [
            self._span(table_SB[s], int(first_S[s]), int(num_new_S[s]), int(length_S[s]), bool(adjacent_S[s]))
            for s in np.flatnonzero(alone_S)
        ]
        return [*spans, self._batch(table_SB, together, length_S, first_S)] if len(together) > 1 else spans

    def _span(self, table_B: Integers, first: int, num_new: int, length: int, adjacent: bool) -> Span:
        num_blocks = -(-length // self.block_size)
        return Span(
            first=first,
            num_new=num_new,
            length=length,
            block_size=self.block_size,
            first_slot=int(table_B[0]) * self.block_size,
            blocks_B=None if adjacent else self._tensor(table_B[:num_blocks]),
            mask_nL=None if num_new == 1 else self._causal(num_new, length),
        )

    def _batch(self, table_SB: Integers, together: Integers, length_S: Integers, first_S: Integers) -> Batch:
        length_S = length_S[together]
        num_blocks = -(-int(length_S.max()) // self.block_size)
        absent_SP = np.arange(num_blocks * self.block_size) >= length_S[:, None]
        mask_SP = torch.zeros(absent_SP.shape, dtype=self.dtype, device=self.device)
        mask_SP.masked_fill_(self._tensor(absent_SP), -torch.inf)
        whole_step = len(together) == len(table_SB)
        return Batch(
            rows_S=None if whole_step else self._tensor(first_S[together]),
            num_sequences=len(together),
            block_size=self.block_size,
            blocks_SB=self._tensor(table_SB[together, :num_blocks].reshape(-1)),
            mask_S11P=mask_SP[:, None, None],
        )

    def _causal(self, num_new: int, length: int) -> Tensor:
        """Row i is the token at position length - num_new + i: it sees that position and those before."""
        mask_nL = torch.full((num_new, length), -torch.inf, dtype=self.dtype, device=self.device)
        return mask_nL.triu_(length - num_new + 1)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _check(plan: StepPlan, num_new_S: Integers, context_S: Integers, block_size: int) -> None:
    if not len(plan.num_new) == len(plan.num_context) == len(plan.block_tables):
        raise ValueError(f"step {plan.step}: {len(plan.num_new)} sequences, {len(plan.block_tables)} block tables")
    if num_new_S.sum() != len(plan.token_ids) or (num_new_S < 1).any():
        raise ValueError(f"step {plan.step}: {len(plan.token_ids)} tokens for sequences of {plan.num_new}")
    for sequence, (table, num_keys) in enumerate(zip(plan.block_tables, num_new_S + context_S, strict=True)):
        if len(table) * block_size < num_keys:
            raise ValueError(f"step {plan.step}: sequence {sequence} has {len(table)} blocks for {num_keys} tokens")


def _table(block_tables: list[list[int]]) -> Integers:
    """Ragged rows padded with block 0, whose keys the masks hide."""
    width = max(map(len, block_tables))
    return np.array([table + [0] * (width - len(table)) for table in block_tables], np.int64)


def _adjacent(table_SB: Integers, num_blocks_S: Integers) -> npt.NDArray[np.bool_]:
    """Whether the blocks in use follow one another, for each sequence."""
    follows_SB = table_SB[:, 1:] == table_SB[:, :-1] + 1
    unused_SB = np.arange(1, table_SB.shape[1]) >= num_blocks_S[:, None]
    return np.asarray((follows_SB | unused_SB).all(axis=1))
