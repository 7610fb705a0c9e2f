"""A GGUF file as a directory in the Hugging Face layout, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from ryzanstein.tools.atomic import new_directory
from ryzanstein.tools.convert.quantize import quantize
from ryzanstein.tools.progress import ConversionProgress
from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.names import is_stored_in_full
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Part
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.places import by_source, tensor_parts
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.gguf.rows import checked_tensor, read_rows
from ryzanstein.worker.checkpoints.gguf.sampling import sampling_of
from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers
from ryzanstein.worker.checkpoints.gguf.tokenizer.conversion import generation_config, tokenizer_config, tokenizer_json
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import GgufVocabulary
from ryzanstein.worker.checkpoints.stacked_experts import stacked_name
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import FLOATS, BlockType
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.refusal import CheckpointError, excerpt

_TORCH_NAMES = {block_types.F32: "float32", block_types.F16: "float16", block_types.BF16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A tensor of a checkpoint, and the parts of the file's tensors that it consists of."""

    source: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of a checkpoint, its types in the file, and the floats that it becomes."""

    place: SourcePlace
    stored: frozenset[BlockType]
    dtype: BlockType

    @property
    def num_bytes(self) -> int:
        return self.dtype.row_bytes(math.prod(self.place.shape))

    def windows(self, file: GgufFile) -> Iterator[Numbers]:
        """Yields the checkpoint's rows as float32, a window at a time. A row of a vector may be one number."""
        parts = self.place.parts
        for _, numbers in read_rows(file, parts, 0, sum(part.count for part in parts)):
            yield numbers


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What a file contains, understood and checked: nothing of it has been converted."""

    config: Mapping[str, Any]
    vocabulary: GgufVocabulary
    tensors: tuple[PlacedTensor, ...]
    sampling: Mapping[str, Any]


def read_model(file: GgufFile, dtype: BlockType) -> GgufModel:
    """Returns the model in a file; quantized tensors become `dtype`.

    Raises CheckpointError, which names the file and what is wrong or not supported in it.
    """
    description = GgufDescription.of(file)
    config, spec = description.config, spec_of(description.config)
    if any(layer.experts is not None and layer.experts.biased for layer in spec.layers):
        raise CheckpointError(
            f"{file.path}: a directory of {spec.model_type} has all experts of a layer in one tensor, which is not written: "
            "serve the file itself"
        )
    parts = tensor_parts(spec, tensor_shapes(spec), description.dialect, file.tensors)
    places = _stacked([SourcePlace(source, found[0].shape, found) for source, found in by_source(parts).items()])
    stored = [frozenset(checked_tensor(file, part).type for part in place.parts) for place in places]
    rest = file.tensors.keys() - {part.name for part in parts}
    unread = next((name for name in rest if not name.startswith(description.unread)), None)
    if unread is not None:
        raise CheckpointError(f"{file.path}: tensor {excerpt(unread)} is not used by this architecture")
    vocabulary = description.vocabulary(file)
    main = _main_dtype(places, stored, dtype)
    placed = tuple(_placed(file, place, kinds, dtype, main) for place, kinds in zip(places, stored, strict=True))
    described = {**config, **_token_ids(vocabulary), "torch_dtype": _TORCH_NAMES[main]}
    return GgufModel(described, vocabulary, placed, sampling_of(file.metadata))


def _stacked(places: Sequence[SourcePlace]) -> list[SourcePlace]:
    """Returns the places with one for all experts of a layer, where checkpoints always have them in one tensor."""
    stacks: dict[str, list[SourcePlace]] = {}
    for place in places:
        stacks.setdefault(stacked_name(place.source) or place.source, []).append(place)
    return [_stack(name, members) if name != members[0].source else members[0] for name, members in stacks.items()]


def _stack(name: str, members: Sequence[SourcePlace]) -> SourcePlace:
    """Returns a place for matrices of one shape, by expert: its gate, then its up; or its down."""
    parts = [part for member in members for part in member.parts]
    starts = accumulate((part.count for part in parts), initial=0)
    placed = tuple(replace(part, source=name, start=start) for part, start in zip(parts, starts, strict=False))
    num_experts = sum(not member.source.endswith(".up_proj.weight") for member in members)
    return SourcePlace(name, (num_experts, sum(part.count for part in parts) // num_experts, members[0].shape[1]), placed)


def to_directory(source: Path, target: Path, dtype: BlockType, out: TextIO, *, force: bool = False) -> None:
    """Writes the model of a GGUF file as a directory of safetensors, complete or not at all.

    Raises ModelRefused; OSError. Progress is written to `out`.
    """
    with GgufFile.open(source) as file:
        model = read_model(file, dtype)
        with new_directory(target, force=force) as directory:
            _write_json(directory / "config.json", model.config)
            write_description(model, directory, str(source))
            with (directory / "model.safetensors").open("wb") as weights:
                _write_weights(weights, file, model.tensors, out)


def write_description(model: GgufModel, directory: Path, where: str) -> None:
    """Writes what a directory has besides config.json and weights. `where` names the file in a message.

    Raises CheckpointError if the tokenizer is not supported; OSError.
    """
    _write_json(directory / "tokenizer.json", tokenizer_json(model.vocabulary, where), indent=None)
    context_length = model.config["max_position_embeddings"]
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model.vocabulary, context_length))
    _write_json(directory / "generation_config.json", {**generation_config(model.vocabulary), **model.sampling})


def _main_dtype(places: list[SourcePlace], stored: list[frozenset[BlockType]], dtype: BlockType) -> BlockType:
    """Returns the floats of most matrices: `dtype` if there are quantized ones."""
    matrices = [kind for place, kinds in zip(places, stored, strict=True) if not _in_full(place) for kind in kinds]
    if any(kind not in FLOATS for kind in matrices):
        return dtype
    return Counter(matrices).most_common(1)[0][0]


def _in_full(place: SourcePlace) -> bool:
    return all(is_stored_in_full(part.name, part.stored_shape) for part in place.parts)


def _placed(
    file: GgufFile, place: SourcePlace, stored: frozenset[BlockType], dtype: BlockType, main: BlockType
) -> PlacedTensor:
    """Chooses the floats of a tensor: its own, or `dtype` if it is quantized.

    llama.cpp stores vectors and some matrices as float32 whatever the model's dtype was. They become
    `main` if that loses nothing.
    """
    if len(stored) > 1 or not stored <= set(FLOATS):
        return PlacedTensor(place, stored, dtype)
    kept = PlacedTensor(place, stored, next(iter(stored)))
    if not _in_full(place) or kept.dtype == main:
        return kept
    numbers = np.concatenate(list(kept.windows(file)), axis=None)
    again = dequantize(quantize(numbers[None], main), main)
    return PlacedTensor(place, stored, main) if np.array_equal(again, numbers) else kept


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
        for numbers in each.windows(file):
            stored = quantize(numbers, each.dtype)
            weights.write(np.ascontiguousarray(stored).data)
            progress.add(stored.nbytes, each.place.source)
        for part in each.place.parts:
            file.forget(file.tensor(part.name))


def _write_json(path: Path, content: Mapping[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
