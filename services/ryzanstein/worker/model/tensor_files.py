"""The files of a checkpoint and what their headers say, read without torch and without touching a weight.

A safetensors file is eight bytes of header length, a JSON header with dtype, shape and byte range of each tensor, then the
tensors (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from ryzanstein.worker.model.refusal import CheckpointError

MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor, with the name that its file has for it. It begins `offset` bytes into the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int


def read_tensor_files(model_dir: Path) -> Mapping[str, TensorEntry]:
    """Every tensor of the checkpoint by name. Raises CheckpointError naming the file, and the tensor that it breaks off in."""
    index_file = model_dir / "model.safetensors.index.json"
    if not index_file.exists():
        return _read_header(model_dir / "model.safetensors")
    weight_map = _read_index(index_file)
    headers = {file: _read_header(model_dir / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"{model_dir / file}: tensor {name} is missing, {index_file.name} places it there")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: no weight_map: {error}") from error
    if not isinstance(weight_map, dict) or not all(_is_plain_name(file) for file in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensors to files in the same directory")
    return weight_map


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= MAX_HEADER_BYTES else b""
        file_bytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if length != len(header):
        raise CheckpointError(f"{path}: truncated in its header: {file_bytes} bytes, the header alone claims {length}")
    return _entries(path, header, 8 + length, file_bytes)


def _entries(path: Path, header: bytes, data_start: int, file_bytes: int) -> dict[str, TensorEntry]:
    try:
        table = json.loads(header)
        table.pop("__metadata__", None)
        return {name: _entry(path, name, fields, data_start, file_bytes) for name, fields in table.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int, file_bytes: int) -> TensorEntry:
    start, end = map(index, fields["data_offsets"])
    shape, dtype = tuple(map(index, fields["shape"])), fields["dtype"]
    data_bytes = file_bytes - data_start
    if not 0 <= start <= end:
        raise CheckpointError(f"{path}: tensor {name} lies from byte {start} to {end}, which is no range")
    if end > data_bytes:
        raise CheckpointError(f"{path}: truncated in tensor {name}: it ends at byte {end} of the data, there are {data_bytes}")
    if dtype in _ITEM_BYTES and end - start != _ITEM_BYTES[dtype] * math.prod(shape):
        raise CheckpointError(f"{path}: tensor {name} has {end - start} bytes, {dtype} {list(shape)} needs another number")
    return TensorEntry(name, path, shape, dtype, data_start + start)
