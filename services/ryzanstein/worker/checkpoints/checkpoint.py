"""Weights of a checkpoint, checked before anything is allocated. Each rank reads its slices.

Both passes construct the decoder, from different sources of weights: `CheckedWeights` builds it on
the meta device, which holds shapes and no numbers; `MappedWeights` builds it in memory. What a file
has of a tensor is the business of `WeightFiles`, what is kept of it that of `WeightFormat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from ryzanstein.worker.checkpoints.memory import WeightMemory
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.products.int8 import FillRows, Int8Table
from ryzanstein.worker.refusal import CheckpointError

_MAX_NUMBERS = 2**48  # of a tensor; torch cannot name the bytes of much larger ones


class WeightFiles(Protocol):
    """The files of a checkpoint: tensors by the names that the architecture uses."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError if the tensor is missing, has another shape or cannot be read."""
        ...

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        """Fills `out` with a slice of a tensor that was checked, as `WeightSource.read` does."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """Returns the blocks of a matrix, or None if there is no such matrix in blocks."""
        ...

    def places(self) -> Iterable[tuple[str, str]]:
        """Returns the name of every tensor, and the file that has it."""
        ...

    def close(self) -> None:
        """Closes the files. What was read stays."""
        ...


class CheckedWeights:
    """A WeightSource that allocates nothing.

    It checks that each tensor exists and fits, and adds up the bytes.
    Raises CheckpointError, which names the tensor and the file.
    """

    def __init__(self, files: WeightFiles, dtype: torch.dtype, weight_format: WeightFormat) -> None:
        self._files, self._dtype, self._format = files, dtype, weight_format
        self._read: set[str] = set()
        self._in_blocks: set[str] = set()
        self.unpacked: set[str] = set()
        """Matrices that the file has in blocks and this rank keeps as floats: its columns are not whole blocks."""
        self.kernels: NativeKernels | None = None
        self.adapters = AdapterSites()
        self.nbytes = 0
        self.read_bytes = 0
        """The bytes that reading fills: as many as `MappedWeights` tells of."""

    def new(self, *shape: int) -> Tensor:
        if math.prod(shape) > _MAX_NUMBERS:
            raise CheckpointError(f"config.json describes a tensor of shape {list(shape)}, which is too large")
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        self.nbytes += tensor.nbytes
        return tensor

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        self._files.check(name, shape)
        self._read.add(name)
        self.read_bytes += out.nbytes
        if name in self._in_blocks:
            self.unpacked.add(name)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        found = self._format.kept_blocks(self._files.blocks(name))
        if found is not None:
            self._files.check(name, shape)
            self._read.add(name)
            self._in_blocks.add(name)
        return found

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        self.nbytes += self._format.added_bytes(weight_OI, kept=kept)
        return _no_product

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        table = self._format.empty_table(shape)
        if table is not None:
            fill(0, torch.empty(shape, dtype=self._dtype, device="meta"))
            self.nbytes += table.nbytes
        return table

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        memory = torch.empty(self._format.blocks_bytes(parts, num_outputs), dtype=torch.uint8, device="meta")
        self.nbytes += memory.nbytes
        self.read_bytes += memory.nbytes
        return self._format.packed_blocks(parts, num_outputs, memory)

    def refuse_unread(self, ignored: Iterable[str]) -> None:
        """Raises CheckpointError if there is a tensor that no layer reads.

        Such a tensor means another architecture: without it the model's answers would be wrong.
        """
        patterns = [f"*{ending}" for ending in ignored]
        for name, file in self._files.places():
            if name not in self._read and not any(fnmatchcase(name, pattern) for pattern in patterns):
                raise CheckpointError(f"{file}: tensor {name} is not used by this architecture")


def _no_product(x_TI: Tensor) -> Tensor:
    raise AssertionError("a decoder that was only checked has no numbers")


class MappedWeights:
    """A WeightSource that reads files which `CheckedWeights` has accepted. It is a context manager.

    `on_read` gets the size of each tensor after it is read, in bytes.
    """

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat,
        kernels: NativeKernels | None = None,
        *,
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._files, self._format, self.kernels, self._on_read = files, weight_format, kernels, on_read
        self.adapters = AdapterSites(kernels)
        self._memory, self._bytes = WeightMemory(dtype, device), WeightMemory(torch.uint8, device)
        self.new = self._memory.zeros
        self.product, self.table = weight_format.product, weight_format.table

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()
        self._memory.close()
        self._bytes.close()

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        self._files.read(name, shape, out, dim, start)
        self._on_read(out.nbytes)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return self._format.kept_blocks(self._files.blocks(name))

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        memory = self._bytes.zeros(self._format.blocks_bytes(parts, num_outputs))
        packed = self._format.packed_blocks(parts, num_outputs, memory)
        self._on_read(memory.nbytes)
        return packed
