"""A GGUF file as a directory in the Hugging Face layout, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ryzanstein.worker.model.architectures.registry import spec_of
from ryzanstein.worker.model.gguf import block_types
from ryzanstein.worker.model.gguf.atomic import new_directory
from ryzanstein.worker.model.gguf.block_types import FLOATS, BlockType
from ryzanstein.worker.model.gguf.dequantize import dequantize
from ryzanstein.worker.model.gguf.description import GgufDescription
from ryzanstein.worker.model.gguf.file import GgufFile, GgufTensor
from ryzanstein.worker.model.gguf.progress import ConversionProgress
from ryzanstein.worker.model.gguf.quantize import quantize
from ryzanstein.worker.model.gguf.small_blocks import Numbers
from ryzanstein.worker.model.gguf.tensor_places import ROPE_FACTORS, TensorPlace, tensor_places
from ryzanstein.worker.model.gguf.tokenizer_json import generation_config, tokenizer_config, tokenizer_json
from ryzanstein.worker.model.gguf.vocabulary import GgufVocabulary
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.model.refusal import CheckpointError, shown

_WINDOW_NUMBERS = 2**20
_TORCH_NAMES = {block_types.F32: "float32", block_types.F16: "float16", block_types.BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the file, its place in a checkpoint, and the floats that it becomes there."""

    place: TensorPlace
    tensor: GgufTensor
    dtype: BlockType

    @property
    def num_bytes(self) -> int:
        return self.dtype.row_bytes(math.prod(self.place.shape))

    def windows(self) -> Iterator[Numbers]:
        """Yields the checkpoint's rows as float32, a window at a time. The rows of a vector are its numbers."""
        tensor, order = self.tensor, self.place.rows_of_file()
        row_numbers = 1 if order is not None and len(tensor.shape) == 1 else tensor.shape[-1]
        num_rows = math.prod(tensor.shape) // row_numbers
        step = max(1, _WINDOW_NUMBERS // row_numbers)
        stored = np.frombuffer(tensor.blocks, np.uint8).reshape(num_rows, -1)
        for first in range(0, num_rows, step):
            rows = stored[first : first + step] if order is None else stored[order[first : first + step]]
            numbers = dequantize(rows.reshape(-1), tensor.type).reshape(len(rows), row_numbers)
            yield numbers - np.float32(1) if self.place.plus_one else numbers


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a file contains, understood and checked: nothing of it has been converted."""

    config: Mapping[str, Any]
    vocabulary: GgufVocabulary
    tensors: tuple[PlacedTensor, ...]


def read_model(file: GgufFile, dtype: BlockType) -> GgufModel:
    """Returns the model in a file; quantized tensors become `dtype`.

    Raises CheckpointError, which names the file and what is wrong or not supported in it.
    """
    description = GgufDescription.of(file)
    config, spec = description.config, spec_of(description.config)
    places = tensor_places(spec, tensor_shapes(spec), description.dialect)
    pairs = [(place, _checked(file, place)) for place in places]
    unread = next(iter(file.tensors.keys() - {place.name for place in places} - {ROPE_FACTORS}), None)
    if unread is not None:
        raise CheckpointError(f"{file.path}: tensor {shown(unread)} is not used by this architecture")
    vocabulary = description.vocabulary(file)
    main = _main_dtype([tensor for _, tensor in pairs], dtype)
    placed = tuple(_placed(place, tensor, dtype, main) for place, tensor in pairs)
    return GgufModel({**config, **_token_ids(vocabulary), "torch_dtype": _TORCH_NAMES[main]}, vocabulary, placed)


def to_directory(source: Path, target: Path, dtype: BlockType, out: TextIO, *, force: bool = False) -> None:
    """Writes the model of a GGUF file as a directory of safetensors, complete or not at all.

    Raises ModelRefused; OSError. Progress is written to `out`.
    """
    with GgufFile.open(source) as file:
        model = read_model(file, dtype)
        tokenizer = tokenizer_json(model.vocabulary, str(source))
        with new_directory(target, force=force) as directory:
            _write_json(directory / "config.json", model.config)
            _write_json(directory / "tokenizer.json", tokenizer, indent=None)
            context_length = model.config["max_position_embeddings"]
            _write_json(directory / "tokenizer_config.json", tokenizer_config(model.vocabulary, context_length))
            _write_json(directory / "generation_config.json", generation_config(model.vocabulary))
            with (directory / "model.safetensors").open("wb") as weights:
                _write_weights(weights, file, model.tensors, out)


def _checked(file: GgufFile, place: TensorPlace) -> GgufTensor:
    tensor = file.tensor(place.name)
    if tensor.shape != place.shape:
        shapes = f"has shape {list(tensor.shape)}, the metadata need {list(place.shape)}"
        raise CheckpointError(f"{file.path}: tensor {place.name} {shapes}")
    return tensor


def _main_dtype(tensors: list[GgufTensor], dtype: BlockType) -> BlockType:
    """Returns the floats of most matrices: `dtype` if there are quantized ones."""
    matrices = [tensor.type for tensor in tensors if len(tensor.shape) > 1]
    if any(kind not in FLOATS for kind in matrices):
        return dtype
    return Counter(matrices).most_common(1)[0][0]


def _placed(place: TensorPlace, tensor: GgufTensor, dtype: BlockType, main: BlockType) -> PlacedTensor:
    """Chooses the floats of a tensor: its own, or `dtype` if it is quantized.

    llama.cpp stores vectors as float32 whatever the model's dtype was. They become `main` if that
    loses nothing.
    """
    if tensor.type not in FLOATS:
        return PlacedTensor(place, tensor, dtype)
    kept = PlacedTensor(place, tensor, tensor.type)
    if len(tensor.shape) > 1 or tensor.type == main:
        return kept
    numbers = np.concatenate(list(kept.windows()), axis=None)
    again = dequantize(quantize(numbers[None], main), main)
    return PlacedTensor(place, tensor, main) if np.array_equal(again, numbers) else kept


def _token_ids(vocabulary: GgufVocabulary) -> dict[str, int]:
    names = (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("pad", "pad_token_id"))
    return {key: vocabulary.special[name] for name, key in names if name in vocabulary.special}


def _write_weights(weights: BinaryIO, file: GgufFile, tensors: tuple[PlacedTensor, ...], out: TextIO) -> None:
    """Writes a safetensors file: the length of its header, the header, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        start, end = end, end + each.num_bytes
        header[each.place.source] = {"dtype": each.dtype.name, "shape": each.place.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    weights.write(len(text).to_bytes(8, "little") + text)
    progress = ConversionProgress(end, out)
    for each in tensors:
        for numbers in each.windows():
            stored = quantize(numbers, each.dtype)
            weights.write(np.ascontiguousarray(stored).data)
            progress.add(stored.nbytes, each.place.source)
        file.forget(each.tensor)


def _write_json(path: Path, content: Mapping[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
