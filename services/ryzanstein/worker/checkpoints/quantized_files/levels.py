"""The ways in which formats store the levels of a matrix.

Legend: R rows (outputs) and C columns (inputs) of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.schemes.bits import WORD_BITS, first_whole, unpack, words_of
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import Span, StoredTensors

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


def ternary_rows(stored_rows: int) -> int:
    """Returns the number of outputs of a matrix with so many rows of bytes."""
    return stored_rows * _TERNARY
