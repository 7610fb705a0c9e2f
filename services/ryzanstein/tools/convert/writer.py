"""Writes a GGUF file: header first, then the tensors one after the other, as they are produced."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ryzanstein.worker.checkpoints.gguf.header import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, Value
from ryzanstein.worker.kernels.functions.block_types import BlockType

_VERSION = 3
_TYPE_IDS = {np.dtype(name): kind for kind, name in SCALARS.items()}
_BOOL, _UINT32, _FLOAT32 = 7, 4, 6


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written: `shape` has the rows first."""

    name: str
    type: BlockType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.type.row_bytes(math.prod(self.shape))


def write_header(file: BinaryIO, metadata: Mapping[str, Value], tensors: Sequence[PlannedTensor]) -> None:
    """Writes everything before the tensors' data. An int is stored as uint32, a float as float32."""
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += (_string(key), _value(value))
    offset = 0
    for tensor in tensors:
        dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += (_string(tensor.name), dimensions, struct.pack("<IQ", tensor.type.id, offset))
        offset += padded(tensor.num_bytes)
    header = b"".join(parts)
    file.write(header)
    file.write(bytes(padded(len(header)) - len(header)))


def write_tensor(file: BinaryIO, tensor: PlannedTensor, windows: Iterable[np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
    """Writes a tensor's blocks, which must come in the order of the header."""
    written = 0
    for blocks in windows:
        file.write(np.ascontiguousarray(blocks).data)
        written += blocks.nbytes
    if written != tensor.num_bytes:
        raise ValueError(f"tensor {tensor.name} has {tensor.num_bytes} bytes, got {written}")
    file.write(bytes(padded(written) - written))


def padded(num_bytes: int) -> int:
    """Returns the next multiple of the alignment."""
    return -(-num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    stored = text.encode()
    return struct.pack("<Q", len(stored)) + stored


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _UINT32, value)
        case float():
            return struct.pack("<If", _FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case tuple():
            items = b"".join(map(_string, value))
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + items
        case _:
            return struct.pack("<IIQ", ARRAY, _TYPE_IDS[value.dtype], value.size) + value.tobytes()
