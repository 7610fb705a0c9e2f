"""How a cache is divided into blocks and slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
