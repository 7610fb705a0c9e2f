"""The blocks of a quantized matrix, or of a slice of it, made some rows at a time when they are packed.

Legend: R rows, C columns, N inputs of a block, P parts of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.levels import FLOAT4_LEVELS, FLOAT4_ZERO
from ryzanstein.worker.checkpoints.quantized_files.matrix import Kept, QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import Span
from ryzanstein.worker.kernels.functions.block_types import MXFP4, TQ2_0, BlockType
from ryzanstein.worker.products.blocks import G4_32, G4_64, G4_128, G8_32, G8_64, G8_128

_PART = 32
_CODE_OF_LEVEL = {level: code for code, level in reversed(list(enumerate(FLOAT4_LEVELS.tolist())))}
_FLOAT4_CODES = torch.tensor([_CODE_OF_LEVEL.get(level, 0) for level in range(2 * FLOAT4_ZERO + 1)], dtype=torch.uint8)
"""The code of each level. That of 0 is the first of two: the other is -0, which no sum tells from it."""
_TYPES: dict[Kept, tuple[BlockType, ...]] = {
    "ternary": (TQ2_0, G4_128, G4_64, G4_32),
    "4 bits": (G4_128, G4_64, G4_32),
    "8 bits": (G8_128, G8_64, G8_32),
    "4-bit floats": (MXFP4,),
}


def blocks_of(matrix: QuantizedMatrix) -> GroupBlocks | None:
    """Returns the blocks of a whole matrix, or None if blocks cannot have exactly its numbers."""
    if matrix.kept is None or not matrix.has_ordered_groups:
        return None
    if matrix.kept != "4-bit floats" and not matrix.has_half_scales:
        return None
    return _of(matrix, (0, matrix.shape[0]), (0, matrix.shape[1]))


def _of(matrix: QuantizedMatrix, rows: Span, columns: Span) -> GroupBlocks | None:
    """Returns the blocks of a slice, the largest that have one group each and of which it is whole ones."""
    for kind in _TYPES[matrix.kept]:
        if not (matrix.group % kind.numbers or columns[0] % kind.numbers or columns[1] % kind.numbers):
            return GroupBlocks(matrix, kind, rows, columns)
    return None


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of a slice of a quantized matrix."""

    matrix: QuantizedMatrix
    kind: BlockType
    of_rows: Span
    of_columns: Span

    @property
    def shape(self) -> tuple[int, int]:
        return self.of_rows[1], self.of_columns[1]

    def rows(self, start: int, count: int) -> GroupBlocks:
        return replace(self, of_rows=(self.of_rows[0] + start, count))

    def columns(self, start: int, count: int) -> GroupBlocks | None:
        """Returns some columns, perhaps in smaller blocks, or None if they are not whole blocks."""
        return _of(self.matrix, self.of_rows, (self.of_columns[0] + start, count))

    def windows(self) -> Iterator[Tensor]:
        """Yields the bytes of its rows, some rows at a time."""
        for rows in self.matrix.windows(self.of_rows, self.of_columns[1]):
            yield self._bytes(rows)

    def _bytes(self, rows: Span) -> Tensor:
        matrix, num_inputs = self.matrix, self.kind.numbers
        first, count = self.of_columns[0] // num_inputs, self.of_columns[1] // num_inputs
        group_of_block = torch.arange(first, first + count) * num_inputs // matrix.group
        levels = matrix.levels.read(rows, self.of_columns).reshape(rows[1], count, num_inputs)
        scale = matrix.scales.read(rows)[:, group_of_block].unsqueeze(-1)
        if self.kind is MXFP4:
            return torch.cat([_exponents(scale), _four_bits(_FLOAT4_CODES[levels.int()])], dim=-1).flatten(1)
        scale = scale.half()
        if self.kind is TQ2_0:
            return torch.cat([_two_bits(levels), scale.view(torch.uint8)], dim=-1).flatten(1)
        assert matrix.zeros is not None, "whole levels have a zero point"
        zero = matrix.zeros.read(rows)
        zero = zero.expand(scale.shape[:2]) if zero.dim() == 0 else zero.expand(rows[1], -1)[:, group_of_block]
        head = torch.cat([scale, zero.half().unsqueeze(-1)], dim=-1).view(torch.uint8)
        return torch.cat([head, levels if matrix.kept == "8 bits" else _four_bits(levels)], dim=-1).flatten(1)


def _exponents(halves: Tensor) -> Tensor:
    """Returns the bytes of MXFP4's scales, of which `halves` has the halves."""
    return (halves.double().log2() + 128).to(torch.uint8)


def _four_bits(levels: Tensor) -> Tensor:
    """Returns levels as Q4_0 has them: a part's first half in the lower bits, the second in the upper ones."""
    halves = levels.view(*levels.shape[:2], -1, 2, _PART // 2)
    packed: Tensor = halves[..., 0, :] | halves[..., 1, :] << 4
    return packed.flatten(-2)


def _two_bits(levels: Tensor) -> Tensor:
    """Returns levels as TQ2_0 has them: of each 128 the quarters, from the lowest bits on."""
    quarters = levels.view(*levels.shape[:2], 2, 4, _PART)
    packed: Tensor = quarters << torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    return packed.sum(-2, dtype=torch.uint8).flatten(-2)
