"""The scales and zero points of a matrix: for each output and group of inputs, or for rectangles.

Legend: O outputs, I inputs, G groups of inputs, R rows of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.levels import StackedRows, interleaved
from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import WORD_BITS, first_whole, unpack, words_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import Span, StoredTensors


class Zeros(Protocol):
    """The zero points of a matrix, in levels as `Levels` has them."""

    def read(self, rows: Span) -> Tensor:
        """Returns those of some outputs, [R, G] in float32, or one number for all."""
        ...


@dataclass(frozen=True, slots=True)
class SameZero:
    """One zero point for all."""

    zero: int

    def read(self, rows: Span) -> Tensor:
        return torch.tensor(float(self.zero))


@dataclass(frozen=True, slots=True)
class GptqZeros:
    """[G, O], packed along rows. `minus_one`: they are stored less one, which is not read with 3 bits.

    The writer subtracts from whole words, with borrows.
    """

    tensors: StoredTensors
    name: str
    bits: int
    minus_one: bool

    def read(self, rows: Span) -> Tensor:
        first = first_whole(rows[0], self.bits)
        begin, end = first * self.bits // WORD_BITS, words_of(rows[0] + rows[1], self.bits)
        words_GW = self.tensors.files.region(self.name, (0, self.tensors.entries[self.name].shape[0]), (begin, end - begin))
        if self.minus_one:
            ones = sum(1 << bit for bit in range(0, WORD_BITS, self.bits))
            words_GW = ((words_GW.long() + ones) & (2**WORD_BITS - 1)).to(torch.uint32).view(torch.int32)
        return unpack(words_GW, self.bits).narrow(1, rows[0] - first, rows[1]).t().float()


@dataclass(frozen=True, slots=True)
class AwqZeros:
    """[G, O], packed and interleaved as AWQ's levels."""

    tensors: StoredTensors
    name: str

    def read(self, rows: Span) -> Tensor:
        return interleaved(self.tensors, self.name, (0, self.tensors.entries[self.name].shape[0]), rows).t().float()


@dataclass(frozen=True, slots=True)
class PackedZeros:
    """compressed-tensors': [O, G], packed down the columns."""

    tensors: StoredTensors
    name: str
    bits: int

    def read(self, rows: Span) -> Tensor:
        first = first_whole(rows[0], self.bits)
        begin, end = first * self.bits // WORD_BITS, words_of(rows[0] + rows[1], self.bits)
        words_GW = self.tensors.files.region(self.name, (begin, end - begin)).t()
        return unpack(words_GW, self.bits).narrow(1, rows[0] - first, rows[1]).t().float()


@dataclass(frozen=True, slots=True)
class SignedZeros:
    """8 bits with a sign for each `row_block` outputs and group of inputs. `offset` is what made levels unsigned."""

    tensors: StoredTensors
    name: str
    offset: int
    row_block: int = 1

    def read(self, rows: Span) -> Tensor:
        return _of_outputs(self.tensors, self.name, self.row_block, rows) + self.offset


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a matrix, [G, O] if `down`, else a scale for each `row_block` outputs and group of inputs."""

    tensors: StoredTensors
    name: str
    down: bool = False
    row_block: int = 1
    reciprocal: bool = False

    def read(self, rows: Span) -> Tensor:
        """Returns those of some outputs, [R, G] in float32."""
        shape = self.tensors.entries[self.name].shape
        if self.down:
            return self.tensors.files.region(self.name, (0, shape[0]), rows).t().float()
        scale = _of_outputs(self.tensors, self.name, self.row_block, rows)
        return scale.reciprocal() if self.reciprocal else scale

    @property
    def surely_halves(self) -> bool:
        """Whether float16 holds them: they are stored so."""
        return self.tensors.entries[self.name].dtype == "F16" and not self.reciprocal


@dataclass(frozen=True, slots=True)
class Powers:
    """Scales of MXFP4: exponents of two, [experts, outputs, G], for rows of one expert."""

    tensors: StoredTensors
    name: str
    rows: StackedRows
    surely_halves = False

    def read(self, rows: Span) -> Tensor:
        """Returns those of some outputs, [R, G] in float32; they are halved, for levels that are twice the numbers."""
        exponents_RG = self.rows.read(self.tensors, self.name, rows, (0, self.tensors.entries[self.name].shape[2]))
        return torch.exp2(exponents_RG.double() - 128).float()


def _of_outputs(tensors: StoredTensors, name: str, row_block: int, rows: Span) -> Tensor:
    """Returns the numbers of some outputs, [R, G] in float32, from [O / row_block, G]; one row is that of all outputs."""
    shape = tensors.entries[name].shape
    if len(shape) < 2 or shape[0] == 1:
        return tensors.whole(name).float().view(1, -1).expand(rows[1], -1)
    first, last = rows[0] // row_block, (rows[0] + max(1, rows[1]) - 1) // row_block
    stored = tensors.files.region(name, (first, last - first + 1)).float()
    return stored[torch.arange(rows[0], rows[0] + rows[1]) // row_block - first]
