"""The files of a checkpoint and their headers, read without torch and without reading a weight.

A safetensors file is eight bytes of header length, a JSON header with dtype, shape and byte range
of each tensor, then the tensors, one after the other (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from ryzanstein.worker.architectures.text_half import text_tensors
from ryzanstein.worker.checkpoints.stacked_experts import separate_experts
from ryzanstein.worker.checkpoints.tensor_entry import ITEM_BYTES, TensorEntry
from ryzanstein.worker.json_files import (
    MAX_POINTER_BYTES,
    UnreadableFile,
    open_regular,
    parse_object,
    read_object,
    refuse_pointer,
)
from ryzanstein.worker.refusal import CheckpointError, excerpt

MAX_HEADER_BYTES = 16 * 2**20
"""A header of this size, 150,000 tensors, takes a second to read; known models need a hundredth."""
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin", "tf_model.h5", "flax_model.msgpack"),
    *("*.pth", "consolidated*.safetensors", "adapter_model.safetensors"),
)
_PARTS = "model-*-of-*.safetensors"


def read_tensor_files(model_dir: Path) -> Mapping[str, TensorEntry]:
    """Returns every tensor of the checkpoint by name, of a multimodal model those of its text half, of experts each one's.

    Raises CheckpointError, which names the file and, if it is truncated, the tensor where it ends.
    """
    return separate_experts(text_tensors(_read(model_dir)))


def _read(model_dir: Path) -> Mapping[str, TensorEntry]:
    index_file = model_dir / _INDEX
    if not os.path.lexists(index_file):
        return _read_whole(model_dir)
    weight_map = _read_index(index_file)
    headers = {file: read_header(model_dir / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CheckpointError(f"{model_dir / file}: tensor {name} is missing, but listed there in {index_file.name}")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _read_whole(model_dir: Path) -> Mapping[str, TensorEntry]:
    """Returns the tensors of a checkpoint without an index: all of them are in one file."""
    path = model_dir / _WEIGHTS
    if not os.path.lexists(path):
        gguf = next(model_dir.glob("*.gguf"), None)
        if gguf is not None:
            raise CheckpointError(
                f"{path}: No such file or directory. {gguf.name} can be served as it is, with --model {gguf}, "
                f"or converted to a directory by `ryzanstein convert`"
            )
        if next(model_dir.glob(_PARTS), None) is not None:
            raise CheckpointError(f"{model_dir / _INDEX}: No such file or directory, but its parts are there: download it too")
        other = next((found.name for pattern in _OTHER_FORMATS for found in model_dir.glob(pattern)), None)
        if other is not None:
            raise CheckpointError(
                f"{path}: No such file or directory. {other} exists, but its format is not supported: "
                "save the model as safetensors, with save_pretrained of transformers"
            )
    return read_header(path)


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = read_object(path).get("weight_map")
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: no weight_map: {error}") from error
    if not isinstance(weight_map, dict) or not all(map(_is_plain_name, weight_map.values())):
        raise CheckpointError(f"{path}: weight_map must map tensors to files in the same directory")
    return weight_map


def _is_plain_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")


def read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with open_regular(path) as file:
            begin = file.read(MAX_POINTER_BYTES)
            refuse_pointer(begin)
            file.seek(8)
            length = int.from_bytes(begin[:8], "little")
            header = file.read(length) if length <= MAX_HEADER_BYTES else b""
            file_bytes = os.fstat(file.fileno()).st_size
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if MAX_HEADER_BYTES < length <= file_bytes:
        raise CheckpointError(f"{path}: its header has {length} bytes, more than {MAX_HEADER_BYTES}")
    if length != len(header):
        raise CheckpointError(f"{path}: truncated in its header: {file_bytes} bytes, the header alone claims {length}")
    return _entries(path, header, 8 + length, file_bytes)


def _entries(path: Path, header: bytes, data_start: int, file_bytes: int) -> dict[str, TensorEntry]:
    try:
        table = parse_object(header)
        table.pop("__metadata__", None)
        entries = {name: _entry(path, name, fields, data_start, file_bytes) for name, fields in table.items()}
    except (UnreadableFile, ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
    _check_neighbours(path, entries, data_start)
    return entries


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int, file_bytes: int) -> TensorEntry:
    start, end = map(index, fields["data_offsets"])
    shape, dtype = tuple(map(index, fields["shape"])), fields["dtype"]
    data_bytes = file_bytes - data_start
    if not 0 <= start <= end:
        raise _wrong(path, name, f"has an invalid byte range, from {excerpt(start)} to {excerpt(end)}")
    if end > data_bytes:
        raise CheckpointError(
            f"{path}: truncated in tensor {name}: it ends at byte {excerpt(end)} of the data, which has {data_bytes}"
        )
    if min(shape, default=0) < 0 or not isinstance(dtype, str):
        raise _wrong(path, name, f"has shape {excerpt(list(shape))} and dtype {excerpt(dtype)}")
    if dtype in ITEM_BYTES and end - start != ITEM_BYTES[dtype] * math.prod(shape):
        raise _wrong(path, name, f"has {end - start} bytes, {dtype} {excerpt(list(shape))} requires a different number")
    return TensorEntry(name, path, shape, dtype, data_start + start, end - start)


def _check_neighbours(path: Path, entries: Mapping[str, TensorEntry], data_start: int) -> None:
    """Raises CheckpointError if tensors overlap: the format stores them one after the other."""
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < end:
            raise _wrong(path, entry.name, f"begins at byte {entry.offset}, before the previous tensor ends")
        end = entry.offset + entry.num_bytes


def _wrong(path: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {name} {what}")
