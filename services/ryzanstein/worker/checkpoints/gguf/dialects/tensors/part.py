"""A run of rows of a checkpoint's tensor that follow each other in a GGUF file.

Tensors are seen as rows; a vector that is one in both is a row for each number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers

Order = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Change:
    """How numbers of a file are made of those of a checkpoint, and back, in float32."""

    to_file: Callable[[Numbers], Numbers]
    from_file: Callable[[Numbers], Numbers]


PLUS_ONE = Change(lambda numbers: numbers + np.float32(1), lambda numbers: numbers - np.float32(1))
"""Scales of norms with one added."""
MINUS_EXP = Change(lambda numbers: -np.exp(numbers), lambda numbers: np.log(-numbers))
"""Decays, of which a checkpoint has the logarithm."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start` to `start + count` of the checkpoint's tensor `source`, whose shape is `shape`.

    In the file they begin at row `first` of tensor `name`, whose shape is `stored_shape`. `heads`:
    they are those of so many heads, reordered. `transposed`: they are columns in the file.
    `tiled`: their columns are those of the value heads of so many key heads, of this size; the file has
    the first of each key head before the second of any. `change`: their numbers are others in the file.
    """

    source: str
    shape: tuple[int, ...]
    name: str
    stored_shape: tuple[int, ...]
    start: int
    count: int
    first: int = 0
    heads: int | None = None
    transposed: bool = False
    tiled: tuple[int, int] | None = None
    change: Change | None = None

    @property
    def width(self) -> int:
        """The numbers of a row of the checkpoint's tensor."""
        return 1 if len(self.shape) == len(self.stored_shape) == 1 else self.shape[-1]

    @property
    def stored_width(self) -> int:
        """The numbers of a row in the file."""
        return self.count if self.transposed else self.width

    @property
    def stored_count(self) -> int:
        """The rows that it takes in the file."""
        return self.width if self.transposed else self.count

    @property
    def keeps_blocks(self) -> bool:
        """Whether a row of the checkpoint has the blocks of a row of the file."""
        return not (self.transposed or self.change or self.tiled)

    def rows_of_source(self) -> Order | None:
        """Returns the part's row for each row of it in the file; None: they are the same."""
        if self.heads is None:
            return None
        return np.arange(self.count).reshape(self.heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def rows_of_file(self) -> Order | None:
        """Returns the row in the file, from `first` on, for each row of the part; None: they are the same."""
        rows = self.rows_of_source()
        return None if rows is None else np.argsort(rows)

    def to_file(self, rows: Numbers) -> Numbers:
        """Returns the numbers that the file has of whole rows."""
        if self.tiled is not None:
            num_key_heads, dim = self.tiled
            rows = np.ascontiguousarray(rows.reshape(len(rows), num_key_heads, -1, dim).swapaxes(1, 2)).reshape(len(rows), -1)
        return rows if self.change is None else self.change.to_file(rows)

    def from_file(self, rows: Numbers) -> Numbers:
        """Returns the numbers of whole rows that the file has so."""
        if self.tiled is not None:
            num_key_heads, dim = self.tiled
            rows = np.ascontiguousarray(rows.reshape(len(rows), -1, num_key_heads, dim).swapaxes(1, 2)).reshape(len(rows), -1)
        return rows if self.change is None else self.change.from_file(rows)
