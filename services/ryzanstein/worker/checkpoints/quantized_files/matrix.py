"""A quantized matrix of a file: scale * (level - zero), with a scale and a zero point for each group of inputs.

Legend: O outputs, I inputs, R rows and C columns of a slice, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.levels import Levels
from ryzanstein.worker.checkpoints.quantized_files.scales import Powers, Scales, Zeros
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import Span, StoredTensors
from ryzanstein.worker.refusal import CheckpointError

Kept = Literal["ternary", "4 bits", "8 bits", "4-bit floats", None]
"""The blocks that have room for a matrix's levels; floats of 8 bits have none."""

_WINDOW_NUMBERS = 2**20
_LEAST_ROWS = 16
"""Of a window: where a row of the file has the levels of many outputs, fewer would read its pages many times."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix whose tensors were checked by their headers. `stored` is the tensor that has the levels.

    `group`: inputs of a group, in their order. `index`: a tensor with the group of each input instead.
    """

    tensors: StoredTensors
    stored: str
    shape: tuple[int, int]
    levels: Levels
    scales: Scales | Powers
    zeros: Zeros | None
    group: int
    kept: Kept = None
    index: str | None = None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError if the matrix has another shape, or an index is out of its groups."""
        if self.shape != shape:
            raise self.tensors.error(
                self.stored, f"has the levels of a matrix of shape {list(self.shape)}, config.json needs {list(shape)}"
            )
        if self.index is not None:
            _ = self._index_I

    def floats(self, rows: Span, columns: Span) -> Tensor:
        """Returns some numbers in float32, [R, C]."""
        weight_RC = self.levels.read(rows, columns).float()
        start, end = columns[0], columns[0] + columns[1]
        index_C = torch.arange(start, end) // self.group if self.index is None else self._index_I[start:end]
        if self.zeros is not None:
            zero = self.zeros.read(rows)
            weight_RC -= zero if zero.dim() == 0 else zero.expand(rows[1], -1)[:, index_C]
        return weight_RC.mul_(self.scales.read(rows)[:, index_C])

    def windows(self, rows: Span, num_columns: int) -> Iterator[Span]:
        """Yields parts of some rows, each so small that its numbers take a few MiB."""
        step = max(_LEAST_ROWS, _WINDOW_NUMBERS // max(1, num_columns))
        for start in range(rows[0], rows[0] + rows[1], step):
            yield start, min(step, rows[0] + rows[1] - start)

    @cached_property
    def has_ordered_groups(self) -> bool:
        """Whether the inputs of each group follow each other, and so do the groups."""
        return self.index is None or torch.equal(self._index_I, torch.arange(self.shape[1]) // self.group)

    @cached_property
    def has_half_scales(self) -> bool:
        """Whether float16 holds all scales exactly."""
        if self.scales.surely_halves:
            return True
        scales = (self.scales.read(rows) for rows in self.windows((0, self.shape[0]), self.shape[1] // self.group))
        return all(torch.equal(scale.half().float(), scale) and bool(scale.isfinite().all()) for scale in scales)

    @cached_property
    def _index_I(self) -> Tensor:
        assert self.index is not None, "there is an index"
        index_I, num_groups = self.tensors.whole(self.index).long(), -(-self.shape[1] // self.group)
        least, most = int(index_I.min()), int(index_I.max())
        if least < 0 or most >= num_groups:
            raise self._out_of_range(least if least < 0 else most, num_groups)
        return index_I

    def _out_of_range(self, number: int, num_groups: int) -> CheckpointError:
        assert self.index is not None, "there is an index"
        return self.tensors.error(self.index, f"refers to group {number} of {num_groups}")
