"""The tensors of a GGUF file under the names of our architectures, in their blocks or as floats."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ryzanstein.worker.model.architectures.registry import spec_of
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.gguf.block_types import FLOATS
from ryzanstein.worker.model.gguf.dequantize import dequantize
from ryzanstein.worker.model.gguf.description import GgufDescription
from ryzanstein.worker.model.gguf.file import GgufFile, GgufTensor
from ryzanstein.worker.model.gguf.small_blocks import Bytes
from ryzanstein.worker.model.gguf.tensor_places import ROPE_FACTORS, TensorPlace, tensor_places
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.model.products.blocks import Blocks
from ryzanstein.worker.model.refusal import CheckpointError

_WINDOW_NUMBERS = 2**20


def open_gguf(path: Path) -> tuple[DecoderSpec, GgufFiles]:
    """Opens a file and returns the decoder that it describes, and its tensors. Raises CheckpointError."""
    file = GgufFile.open(path)
    description = GgufDescription.of(file)
    spec = spec_of(description.config)
    places = tensor_places(spec, tensor_shapes(spec), description.dialect)
    return spec, GgufFiles(file, {place.source: place for place in places})


class GgufFiles:
    """A WeightFiles of one GGUF file. `places` has the file's tensors by the names that the architecture uses."""

    def __init__(self, file: GgufFile, places: Mapping[str, TensorPlace]) -> None:
        self._file, self._places = file, places

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        place = self._places.get(name)
        tensor = self._file.tensor(name if place is None else place.name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._file.path}: tensor {tensor.name} has shape {list(tensor.shape)}, the metadata need {list(shape)}"
            )

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        count = min(out.shape[dim], shape[dim] - start)
        if count <= 0:
            return
        target, tensor = out.narrow(dim, 0, count), self._file.tensor(self._places[name].name)
        if len(shape) == 1:
            ((_, numbers),) = self._windows(name, 0, 1)
            target.copy_(numbers[0, start : start + count])
        else:
            first_row = start if dim == 0 else 0
            for row, numbers in self._windows(name, first_row, len(target)):
                part = numbers if dim == 0 else numbers.narrow(1, start, count)
                target.narrow(0, row - first_row, len(numbers)).copy_(part)
        self._file.forget(tensor)

    def blocks(self, name: str) -> Blocks | None:
        place = self._places.get(name)
        tensor = None if place is None else self._file.tensors.get(place.name)
        if place is None or tensor is None or len(tensor.shape) != 2 or tensor.type in FLOATS or place.plus_one:
            return None
        order = place.rows_of_file()
        in_order = None if order is None else torch.from_numpy(order)
        return Blocks(tensor.type, _as_tensor(_bytes_of(tensor)), in_order, partial(self._file.forget, tensor))

    def places(self) -> Iterator[tuple[str, str]]:
        names = {place.name: source for source, place in self._places.items()}
        return ((names.get(name, name), str(self._file.path)) for name in self._file.tensors if name != ROPE_FACTORS)

    def close(self) -> None:
        self._file.close()

    def _windows(self, name: str, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yields `count` of the checkpoint's rows from `first` on: the first row's number, and the rows."""
        place = self._places[name]
        tensor, order = self._file.tensor(place.name), place.rows_of_file()
        stored, width = _bytes_of(tensor), tensor.shape[-1]
        step = max(1, _WINDOW_NUMBERS // width)
        for row in range(first, first + count, step):
            wanted = slice(row, min(row + step, first + count))
            rows = stored[wanted if order is None else order[wanted]]
            numbers = dequantize(rows.reshape(-1), tensor.type).reshape(len(rows), width)
            yield row, _as_tensor(numbers - np.float32(1) if place.plus_one else numbers)


def _bytes_of(tensor: GgufTensor) -> Bytes:
    """Returns the bytes of a tensor's rows, mapped from the file."""
    return np.frombuffer(tensor.blocks, np.uint8).reshape(tensor.num_rows, tensor.row_bytes)


def _as_tensor(numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor with the same memory. torch warns that nobody must write to it, and nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(numbers)
