"""The ways in which formats store the levels of a matrix.

Legend: R rows (outputs) and C columns (inputs) of a slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import WORD_BITS, first_whole, unpack, words_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import Span, StoredTensors

FLOAT4_LEVELS = torch.tensor([12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0], dtype=torch.uint8)
"""Twice the numbers of a 4-bit float's codes, plus `FLOAT4_ZERO`: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, then the same below 0."""
FLOAT4_ZERO = 12

_TERNARY = 4
"""Ternary levels of a byte."""


class Levels(Protocol):
    """The levels of a matrix in a file."""

    def read(self, rows: Span, columns: Span) -> Tensor:
        """Returns some of them, [R, C]: uint8, or numbers of 8 bits."""
        ...


@dataclass(frozen=True, slots=True)
class PackedDown:
    """GPTQ's: words of [I, O], each of successive inputs of one output."""

    tensors: StoredTensors
    name: str
    bits: int

    def read(self, rows: Span, columns: Span) -> Tensor:
        first = first_whole(columns[0], self.bits)
        begin_word, end_word = first * self.bits // WORD_BITS, words_of(columns[0] + columns[1], self.bits)
        words_WR = self.tensors.files.region(self.name, (begin_word, end_word - begin_word), rows)
        return unpack(words_WR.t(), self.bits).narrow(1, columns[0] - first, columns[1])


@dataclass(frozen=True, slots=True)
class PackedAlong:
    """compressed-tensors': words of [O, I], each of successive inputs of one output."""

    tensors: StoredTensors
    name: str
    bits: int

    def read(self, rows: Span, columns: Span) -> Tensor:
        first = first_whole(columns[0], self.bits)
        begin_word, end_word = first * self.bits // WORD_BITS, words_of(columns[0] + columns[1], self.bits)
        words_RW = self.tensors.files.region(self.name, rows, (begin_word, end_word - begin_word))
        return unpack(words_RW, self.bits).narrow(1, columns[0] - first, columns[1])


@dataclass(frozen=True, slots=True)
class InterleavedAcross:
    """AWQ's "gemm": words of [I, O], each of eight successive outputs of one input, even ones first."""

    tensors: StoredTensors
    name: str

    def read(self, rows: Span, columns: Span) -> Tensor:
        return interleaved(self.tensors, self.name, columns, rows).t()


def interleaved(tensors: StoredTensors, name: str, rows: Span, columns: Span) -> Tensor:
    """Returns levels that AWQ packed along the rows of a matrix."""
    first = first_whole(columns[0], 4)
    begin, end = first // 8, -(-(columns[0] + columns[1]) // 8)
    stored = unpack(tensors.files.region(name, rows, (begin, end - begin)), 4)
    in_order = stored.view(len(stored), -1, 2, 4).transpose(2, 3).flatten(1)
    return in_order.narrow(1, columns[0] - first, columns[1])


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Levels of 8 bits as they are: with a sign, made unsigned here, or floats."""

    tensors: StoredTensors
    name: str

    def read(self, rows: Span, columns: Span) -> Tensor:
        stored = self.tensors.files.region(self.name, rows, columns)
        return stored.view(torch.uint8) ^ 128 if stored.dtype == torch.int8 else stored


@dataclass(frozen=True, slots=True)
class Ternary:
    """BitNet's: levels of 2 bits, four in a byte, of rows a quarter of the matrix apart."""

    tensors: StoredTensors
    name: str

    def read(self, rows: Span, columns: Span) -> Tensor:
        (quarter, _), (start, count) = self.tensors.entries[self.name].shape, rows
        parts = []
        while count:
            shift, row = divmod(start, quarter)
            num_rows = min(count, quarter - row)
            parts.append((self.tensors.files.region(self.name, (row, num_rows), columns) >> 2 * shift) & 3)
            start, count = start + num_rows, count - num_rows
        return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class StackedRows:
    """Rows of one of several matrices in a tensor [matrices, rows, ..]: every `step`-th from `first` on."""

    matrix: int
    first: int = 0
    step: int = 1

    def read(self, tensors: StoredTensors, name: str, rows: Span, columns: Span) -> Tensor:
        """Returns some columns of some rows, as they are stored."""
        entry = tensors.entries[name]
        num_rows, width = entry.shape[1], math.prod(entry.shape[2:])
        whole = replace(entry, shape=(entry.shape[0] * num_rows, width))
        start = self.matrix * num_rows + self.first + rows[0] * self.step
        span = max(0, (rows[1] - 1) * self.step + 1)
        return tensors.files.part(whole, (start, span), columns)[:: self.step]


@dataclass(frozen=True, slots=True)
class Float4:
    """MXFP4's: 4-bit floats in bytes of successive inputs, [matrices, rows, blocks, 16]."""

    tensors: StoredTensors
    name: str
    rows: StackedRows

    def read(self, rows: Span, columns: Span) -> Tensor:
        first, end = columns[0] // 2, -(-(columns[0] + columns[1]) // 2)
        bytes_RB = self.rows.read(self.tensors, self.name, rows, (first, end - first))
        codes_RC = torch.stack((bytes_RB & 15, bytes_RB >> 4), dim=-1).flatten(1)
        return FLOAT4_LEVELS[codes_RC.narrow(1, columns[0] - 2 * first, columns[1]).int()]


def ternary_rows(stored_rows: int) -> int:
    """Returns the number of outputs of a matrix with so many rows of bytes."""
    return stored_rows * _TERNARY
