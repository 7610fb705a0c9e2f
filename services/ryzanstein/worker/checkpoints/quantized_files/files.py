"""The tensors of a quantized checkpoint as a decoder asks for them: matrices in their blocks or as floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

from torch import Tensor

from ryzanstein.worker.checkpoints.quantized_files.group_blocks import blocks_of
from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import StoredTensors
from ryzanstein.worker.products.blocks import Blocks


class QuantizedFiles:
    """A WeightFiles of a directory. Matrices that are not quantized, and all else, are read as they are.

    `unread`: stored tensors that describe a matrix, or that no product needs.
    """

    def __init__(self, tensors: StoredTensors, matrices: Mapping[str, QuantizedMatrix], unread: frozenset[str]) -> None:
        self._tensors, self._matrices, self._unread = tensors, matrices, unread

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._tensors.files.check(name, shape)
            return
        with closing(self):  # a check leaves nothing open
            matrix.check(shape)

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._tensors.files.read(name, shape, out, dim, start)
            return
        count = max(0, min(out.shape[dim], shape[dim] - start))
        rows, columns = ((start, count), (0, shape[1])) if dim == 0 else ((0, shape[0]), (start, count))
        if not count:
            return
        for first, num_rows in matrix.windows(rows, columns[1]):
            target = out[first - rows[0] : first - rows[0] + num_rows, : columns[1]]
            target.copy_(matrix.floats((first, num_rows), columns))

    def blocks(self, name: str) -> Blocks | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        with closing(self):
            return blocks_of(matrix)

    def close(self) -> None:
        self._tensors.files.close()

    def places(self) -> Iterator[tuple[str, str]]:
        for name, matrix in self._matrices.items():
            yield name, str(self._tensors.entries[matrix.stored].file)
        for name, entry in self._tensors.entries.items():
            if name not in self._unread and name not in self._matrices:
                yield name, str(entry.file)
