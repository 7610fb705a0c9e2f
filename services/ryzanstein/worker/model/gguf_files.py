"""The tensors of a GGUF file under the names of our architectures, in their blocks or as floats."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, WeightNames
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.dialects.tensors import deltas
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Part
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.places import by_source, tensor_parts
from ryzanstein.worker.checkpoints.gguf.file import GgufFile, GgufTensor
from ryzanstein.worker.checkpoints.gguf.rows import checked_tensor, read_rows
from ryzanstein.worker.checkpoints.gguf.small_blocks import Bytes
from ryzanstein.worker.kernels.functions.block_types import FLOATS
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.products.blocks import MappedBlocks

_GATE = ".gate"


def open_gguf(path: Path, *, as_stored: bool = False) -> tuple[DecoderSpec, GgufFiles]:
    """Opens a file and returns the decoder that it describes, and its tensors. Raises CheckpointError.

    `as_stored`: linear weights are [outputs, inputs], as they are in any file, the heads of a delta rule are
    in its order, and gates are apart from ups, and not as config.json's architecture has them: blocks can be
    kept so.
    """
    file = GgufFile.open(path)
    description = GgufDescription.of(file)
    spec = spec_of(description.config)
    if as_stored:
        names = _with_gates_apart(spec.names) if description.dialect.split_gate else spec.names
        spec = deltas.as_stored(replace(spec, transposed=False, names=names), description.dialect)
    parts = tensor_parts(spec, tensor_shapes(spec), description.dialect, file.tensors)
    return spec, GgufFiles(file, by_source(parts), description.unread)


def _with_gates_apart(names: WeightNames) -> WeightNames:
    """Returns names where an MLP's gate has one of its own."""
    gate, shared = names.gate, names.shared_projections
    if gate is not None and gate == names.up:
        gate += _GATE
    if shared is not None and shared[0] == shared[1]:
        shared = (shared[0] + _GATE, *shared[1:])
    return replace(names, gate=gate, shared_projections=shared)


class GgufFiles:
    """A WeightFiles of one GGUF file. `parts` has those of each tensor by the name that the architecture uses.

    Tensors whose names begin with one of `unread` are none of the decoder.
    """

    def __init__(self, file: GgufFile, parts: Mapping[str, Sequence[Part]], unread: tuple[str, ...]) -> None:
        self._file, self._parts, self._unread = file, parts, unread

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._parts:
            self._file.tensor(name)
        for part in self._parts[name]:
            checked_tensor(self._file, part)

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        count = min(out.shape[dim], shape[dim] - start)
        if count <= 0:
            return
        target, parts = out.narrow(dim, 0, count), self._parts[name]
        if len(shape) == 1:
            numbers = np.concatenate([rows for _, rows in read_rows(self._file, parts, 0, shape[0])], axis=None)
            target.copy_(_as_tensor(numbers[start : start + count]))
        else:
            first_row = start if dim == 0 else 0
            for row, numbers in read_rows(self._file, parts, first_row, len(target)):
                found = _as_tensor(numbers if dim == 0 else numbers[:, start : start + count])
                place = target.narrow(0, row - first_row, len(numbers))
                place.copy_(found.view_as(place))  # of a convolution the file lacks a dimension of one
        for part in parts:
            self._file.forget(self._file.tensor(part.name))

    def blocks(self, name: str) -> MappedBlocks | None:
        parts = self._parts.get(name, ())
        if not parts or len(parts[0].shape) != 2 or not all(part.keeps_blocks for part in parts):
            return None
        tensor = self._file.tensors.get(parts[0].name)
        if tensor is None or tensor.type in FLOATS or len({part.name for part in parts}) > 1:
            return None
        # A tensor of another shape is refused when it is checked, before it is read.
        return _kept(self._file, tensor, parts) if tensor.shape == parts[0].stored_shape else None

    def places(self) -> Iterator[tuple[str, str]]:
        names: dict[str, list[str]] = {}
        for source, parts in self._parts.items():
            for part in parts:
                names.setdefault(part.name, []).append(source)
        stored = (name for name in self._file.tensors if not name.startswith(self._unread))
        return ((source, str(self._file.path)) for name in stored for source in names.get(name, [name]))

    def close(self) -> None:
        self._file.close()


def _kept(file: GgufFile, tensor: GgufTensor, parts: Sequence[Part]) -> MappedBlocks:
    rows_OB = _as_tensor(_bytes_of(tensor))
    if len(parts) == 1:
        (part,) = parts
        order, size = part.rows_of_file(), tensor.row_bytes
        forget = partial(file.forget, tensor, part.first * size, part.count * size)
        in_order = None if order is None else torch.from_numpy(order)
        return MappedBlocks(tensor.type, rows_OB.narrow(0, part.first, part.count), in_order, forget)
    rows = [part.first + (np.arange(part.count) if (order := part.rows_of_file()) is None else order) for part in parts]
    return MappedBlocks(tensor.type, rows_OB, torch.from_numpy(np.concatenate(rows)), partial(file.forget, tensor))


def _bytes_of(tensor: GgufTensor) -> Bytes:
    """Returns the bytes of a tensor's rows, mapped from the file."""
    return np.frombuffer(tensor.blocks, np.uint8).reshape(tensor.num_rows, tensor.row_bytes)


def _as_tensor(numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    """Returns a tensor with the same memory. torch warns that nobody must write to it, and nobody does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(numbers)
