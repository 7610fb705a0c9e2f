"""Weights from safetensors files, checked before anything is allocated. Each rank reads its slices.

Both passes construct the decoder, from different sources of weights: `CheckedWeights` builds it on
the meta device, which holds shapes and no numbers; `MappedWeights` builds it in memory.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.memory import WeightMemory
from ryzanstein.worker.model.products import Product
from ryzanstein.worker.model.products.formats import WeightFormat
from ryzanstein.worker.model.refusal import CheckpointError
from ryzanstein.worker.model.tensor_files import TensorEntry

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_MAX_NUMBERS = 2**48  # of a tensor; torch cannot name the bytes of much larger ones
_WINDOW_BYTES = 8 * 2**20


class CheckedWeights:
    """A WeightSource that allocates nothing.

    It checks that each tensor exists and fits, and adds up the bytes.
    Raises CheckpointError, which names the tensor and the file.
    """

    def __init__(
        self, entries: Mapping[str, TensorEntry], model_dir: Path, dtype: torch.dtype, weight_format: WeightFormat
    ) -> None:
        self._entries, self._model_dir, self._dtype, self._format = entries, model_dir, dtype, weight_format
        self._read: set[str] = set()
        self.kernels: NativeKernels | None = None
        self.nbytes = 0

    def new(self, *shape: int) -> Tensor:
        if math.prod(shape) > _MAX_NUMBERS:
            raise CheckpointError(f"config.json describes a tensor of shape {list(shape)}, which is too large")
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        self.nbytes += tensor.nbytes
        return tensor

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._model_dir}: tensor {name} is missing")
        if entry.shape != shape:
            raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json needs {list(shape)}")
        if entry.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{entry.file}: tensor {name} has dtype {entry.dtype}, which is not supported")
        self._read.add(name)

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        self.nbytes += self._format.added_bytes(weight_OI, kept=kept)
        return _no_product

    def refuse_unread(self, ignored: Iterable[str]) -> None:
        """Raises CheckpointError if there is a tensor that no layer reads.

        Such a tensor means another architecture: without it the model's answers would be wrong.
        """
        patterns = [f"*{ending}" for ending in ignored]
        for name, entry in self._entries.items():
            if name not in self._read and not any(fnmatchcase(name, pattern) for pattern in patterns):
                raise CheckpointError(f"{entry.file}: tensor {name} is not used by this architecture")


def _no_product(x_TI: Tensor) -> Tensor:
    raise AssertionError("a decoder that was only checked has no numbers")


class MappedWeights:
    """A WeightSource over memory-mapped files, for a checkpoint that `CheckedWeights` has accepted.

    It is a context manager. It maps a window of a few rows at a time: mapped pages count as this
    process's memory until they are unmapped, so a tensor that is mapped whole would take its memory
    twice. Only the rank's slice is read.
    """

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat,
        kernels: NativeKernels | None = None,
    ) -> None:
        self._entries, self.kernels = entries, kernels
        self._memory = WeightMemory(dtype, device)
        self.new = self._memory.zeros
        self.product = weight_format.product
        self._files = ExitStack()
        self._open = cache(self._open_file)

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()
        self._memory.close()

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        count = min(out.shape[dim], shape[dim] - start)
        if count <= 0:
            return
        target, first_row = out.narrow(dim, 0, count), start if dim == 0 else 0
        for row, rows in self._windows(self._entries[name], first_row, len(target)):
            part = rows if dim == 0 else rows.narrow(dim, start, count)
            target.narrow(0, row - first_row, len(rows)).copy_(part)

    def _windows(self, entry: TensorEntry, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yields `count` rows from `first` on in windows: the first row's number, and the rows."""
        file, dtype = self._open(entry.file), STORED_DTYPES[entry.dtype]
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
