"""How a cache is divided into blocks and slots.
And the new tokens of a step, with the tables of the pages that they and their keys are in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """`num_blocks` blocks of `block_size` slots on a device. The slot after them is always zero."""

    num_blocks: int
    block_size: int
    device: torch.device

    @property
    def zero_slot(self) -> int:
        return self.num_blocks * self.block_size

    def slots(self, table_SB: Integers, sequence: Integers, position: Integers) -> Integers:
        """Returns the slots of positions in sequences. The arguments broadcast."""
        return np.asarray(table_SB[sequence, position // self.block_size] * self.block_size + position % self.block_size)

    def tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


@dataclass(frozen=True, slots=True)
class FedTokens:
    """The new tokens of a step: those of sequence s are rows from `first_S` on."""

    num_new_S: Integers
    context_S: Integers
    first_S: Integers
    sequence_T: Integers
    position_T: Integers

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        num_new_S, context_S = np.array(plan.num_new, np.int64), np.array(plan.num_context, np.int64)
        first_S = np.cumsum(num_new_S) - num_new_S
        sequence_T = np.repeat(np.arange(len(num_new_S)), num_new_S)
        position_T = np.arange(len(plan.token_ids)) - (first_S - context_S)[sequence_T]
        return cls(num_new_S, context_S, first_S, sequence_T, position_T)

    @property
    def last_S(self) -> Integers:
        """The row of each sequence's last token."""
        return self.first_S + self.num_new_S - 1


@dataclass(frozen=True, slots=True)
class PageTables:
    """The blocks of each sequence, of which the first has page `first_S`.

    They are padded with block 0. Nothing is read through the padding.
    """

    table_SB: Integers
    first_S: Integers

    @classmethod
    def of(cls, tables: list[list[int]], first_pages: list[int]) -> Self:
        width = max(map(len, tables))
        table_SB = np.array([table + [0] * (width - len(table)) for table in tables], np.int64)
        return cls(table_SB, np.array(first_pages or [0] * len(tables), np.int64))
