"""A step's plan as tensors: token ids, positions, cache slots, and who looks at which keys. Built once, used by every layer.

Legend: T new tokens, S sequences, B blocks of the longest table, L keys of a sequence, P keys of the longest, n new tokens of
one sequence, R sampled rows.
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

# Keys and values of one sequence, from which on a single new token is quicker as a view than gathered into a padded batch:
# the call that it costs of its own against the copy. Threads share the copy, not the calls.
_VIEW_BYTES = 96 * 2**10
_VIEW_BYTES_THREADS = 384 * 2**10

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers read. `last_R` are the rows of T whose logits are wanted."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    last_R: Tensor
    segments: Sequence[Segment]


def view_keys(slot_bytes: int, num_threads: int) -> int:
    """The `view_keys` that is quickest for a cache of so many bytes per token and layer."""
    return (_VIEW_BYTES if num_threads == 1 else _VIEW_BYTES_THREADS) // slot_bytes


@dataclass(frozen=True, slots=True)
class InputBuilder:
    """Turns plans into inputs for one cache geometry, device and dtype (masks are added to scores of that dtype).

    `view_keys`: single new tokens with that many keys in adjacent slots are not batched.
    """

    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    view_keys: int

    def build(self, plan: StepPlan) -> StepInputs:
        """Raises ValueError where the plan contradicts itself."""
        num_new_S, context_S = np.array(plan.num_new, np.int64), np.array(plan.num_context, np.int64)
        _check(plan, num_new_S, context_S, self.block_size)
        first_S = np.cumsum(num_new_S) - num_new_S
        table_SB = _table(plan.block_tables)
        sequence_T = np.repeat(np.arange(len(num_new_S)), num_new_S)
        position_T = np.arange(len(plan.token_ids)) - (first_S - context_S)[sequence_T]
        return StepInputs(
            ids_T=self._tensor(np.array(plan.token_ids, np.int64)),
            positions_T=self._tensor(position_T),
            slots_T=self._tensor(self._slots(table_SB, sequence_T, position_T)),
            last_R=self._tensor((first_S + num_new_S - 1)[np.array(plan.sampled, np.int64)]),
            segments=self._segments(table_SB, num_new_S, context_S + num_new_S, first_S),
        )

    def _slots(self, table_SB: Integers, sequence: Integers, position: Integers) -> Integers:
        """The slots of positions in sequences; the arguments broadcast."""
        return np.asarray(table_SB[sequence, position // self.block_size] * self.block_size + position % self.block_size)

    def _segments(self, table_SB: Integers, num_new_S: Integers, length_S: Integers, first_S: Integers) -> list[Segment]:
        adjacent_S = _adjacent(table_SB, -(-length_S // self.block_size))
        alone_S = (num_new_S > 1) | (adjacent_S & (length_S >= self.view_keys))
        together = np.flatnonzero(~alone_S)
        if len(together) == 1:
            alone_S[together] = True
        spans: list[Segment] = [
            Span(
                int(first_S[s]),
                int(num_new_S[s]),
                self._keys(table_SB, s, length_S, adjacent_S),
                self._causal(num_new_S[s], length_S[s]),
            )
            for s in np.flatnonzero(alone_S).tolist()
        ]
        return [*spans, self._batch(table_SB, together, length_S, first_S)] if len(together) > 1 else spans

    def _keys(self, table_SB: Integers, s: int, length_S: Integers, adjacent_S: npt.NDArray[np.bool_]) -> slice | Tensor:
        if adjacent_S[s]:
            first_slot = int(table_SB[s, 0]) * self.block_size
            return slice(first_slot, first_slot + int(length_S[s]))
        return self._tensor(self._slots(table_SB, np.array(s), np.arange(length_S[s])))

    def _causal(self, num_new: int, length: int) -> Tensor | None:
        """Row i is the token at position length - num_new + i: it sees that position and those before."""
        if num_new == 1:
            return None
        mask_nL = torch.full((num_new, length), -torch.inf, dtype=self.dtype, device=self.device)
        return mask_nL.triu_(length - num_new + 1)

    def _batch(self, table_SB: Integers, together: Integers, length_S: Integers, first_S: Integers) -> Batch:
        length_S1 = length_S[together, None]
        position_P = np.arange(length_S1.max())
        absent_SP = position_P >= length_S1
        padding = self.num_blocks * self.block_size
        slots_SP = np.where(absent_SP, padding, self._slots(table_SB, together[:, None], position_P))
        mask_SP = torch.zeros(absent_SP.shape, dtype=self.dtype, device=self.device)
        whole_step = len(together) == len(table_SB)
        return Batch(
            rows_S=None if whole_step else self._tensor(first_S[together]),
            num_sequences=len(together),
            slots_SP=self._tensor(slots_SP.reshape(-1)),
            mask_S11P=mask_SP.masked_fill_(self._tensor(absent_SP), -torch.inf)[:, None, None],
        )

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
    """Ragged rows padded with block 0; nothing is read through the padding."""
    width = max(map(len, block_tables))
    return np.array([table + [0] * (width - len(table)) for table in block_tables], np.int64)


def _adjacent(table_SB: Integers, num_blocks_S: Integers) -> npt.NDArray[np.bool_]:
    """Whether the blocks in use follow one another, for each sequence."""
    follows_SB = table_SB[:, 1:] == table_SB[:, :-1] + 1
    unused_SB = np.arange(1, table_SB.shape[1]) >= num_blocks_S[:, None]
    return np.asarray((follows_SB | unused_SB).all(axis=1))
