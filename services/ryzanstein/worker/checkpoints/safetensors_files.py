"""The tensors of safetensors files, converted to the model's floats through windows of mapped memory."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.products.blocks import Blocks
from ryzanstein.worker.refusal import CheckpointError

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPES: Mapping[str, torch.dtype] = {
    **STORED_DTYPES,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_WINDOW_BYTES = 8 * 2**20


class SafetensorsFiles:
    """A WeightFiles of safetensors.

    It maps a window of a few rows at a time: mapped pages count as this process's memory until they
    are unmapped, so a tensor that is mapped whole would take its memory twice. Only the rank's slice
    is read.
    """

    def __init__(self, model_dir: Path, entries: Mapping[str, TensorEntry]) -> None:
        self._model_dir, self._entries = model_dir, entries
        self._files = ExitStack()
        self._open = cache(self._open_file)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._model_dir}: tensor {name} is missing")
        if entry.shape != shape:
            raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json needs {list(shape)}")
        if entry.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{entry.file}: tensor {name} has dtype {entry.dtype}, which is not supported")

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        if not shape:
            out.copy_(self.region(name, (0, 1)).view(()))
            return
        count = min(out.shape[dim], shape[dim] - start)
        if count <= 0:
            return
        entry, target = self._entries[name], out.narrow(dim, 0, count)
        if entry.columns_of is not None:
            target.copy_(self._transposed(entry, entry.columns_of, target.shape, dim, start))
            return
        first_row = start if dim == 0 else 0
        for row, rows in self._windows(entry, first_row, len(target)):
            part = rows if dim == 0 else rows.narrow(dim, start, count)
            target.narrow(0, row - first_row, len(rows)).copy_(part)

    def region(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> Tensor:
        """Returns a copy of `rows`, (start, count), and of some columns of a matrix, as they are stored.

        Nothing is checked. Numbers may also be whole ones, or of 8 bits.
        """
        entry = self._entries[name]
        return self.part(entry, rows, columns or (0, math.prod(entry.shape[1:])))

    def part(self, entry: TensorEntry, rows: tuple[int, int], columns: tuple[int, int], step: int = 1) -> Tensor:
        """Returns the same of any matrix in the files; of its columns every `step`-th one."""
        (first, count), (start, width) = rows, columns
        taken = slice(start, start + width * step, step)
        out = torch.empty(count, width, dtype=_DTYPES[entry.dtype])
        if count and width:
            for row, window in self._windows(entry, first, count):
                out[row - first : row - first + len(window)] = window.view(len(window), -1)[:, taken]
        return out

    def _transposed(self, entry: TensorEntry, matrix: TensorEntry, shape: tuple[int, ...], dim: int, start: int) -> Tensor:
        """Returns a slice of a tensor that is stored as the columns of a matrix."""
        columns = (entry.first_column + entry.step * (start if dim == 0 else 0), shape[0])
        rows = (start if dim == 1 else 0, shape[1]) if len(shape) == 2 else (0, 1)
        return self.part(matrix, rows, columns, entry.step).T.reshape(shape)

    def blocks(self, name: str) -> Blocks | None:
        return None

    def places(self) -> Iterator[tuple[str, str]]:
        return ((name, str(entry.file)) for name, entry in self._entries.items())

    def close(self) -> None:
        """Closes the files. Another read opens them again."""
        self._files.close()
        self._open.cache_clear()

    def _windows(self, entry: TensorEntry, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yields `count` rows from `first` on in windows: the first row's number, and the rows."""
        file, dtype = self._open(entry.file), _DTYPES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        # The disk reads ahead while the first windows are converted. If all pages are cached, this
        # costs nothing.
        os.posix_fadvise(file, entry.offset + first * row_bytes, count * row_bytes, os.POSIX_FADV_WILLNEED)
        step = max(1, _WINDOW_BYTES // row_bytes)
        for row in range(first, first + count, step):
            num_rows = min(step, first + count - row)
            begin = entry.offset + row * row_bytes
            yield row, _mapped(file, begin, num_rows * row_bytes, dtype).view(num_rows, *entry.shape[1:])

    def _open_file(self, path: Path) -> int:
        return self._files.enter_context(path.open("rb")).fileno()


def _mapped(file: int, begin: int, num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Returns bytes of a file as numbers, unmapped with the last tensor that refers to them.

    The mapping is copy-on-write because torch requires writable memory; nothing writes to it.
    """
    skip = begin % mmap.ALLOCATIONGRANULARITY
    window = mmap.mmap(file, skip + num_bytes, access=mmap.ACCESS_COPY, offset=begin - skip)
    if skip % dtype.itemsize:  # a header of odd length
        return torch.frombuffer(bytearray(window[skip:]), dtype=dtype)
    return torch.frombuffer(window, dtype=dtype, offset=skip)
