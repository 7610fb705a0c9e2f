"""A directory in the Hugging Face layout as a GGUF file, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ryzanstein.tools.atomic import new_file
from ryzanstein.tools.convert.quantize import quantize, stored_as
from ryzanstein.tools.convert.tokenizer_vocabulary import read_vocabulary
from ryzanstein.tools.convert.writer import PlannedTensor, write_header, write_tensor
from ryzanstein.tools.progress import ConversionProgress
from ryzanstein.worker.architectures.foreign import refuse_quantized
from ryzanstein.worker.architectures.registry import read_config, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, Llama3Scaling, PartScaling
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.hyper_parameters import metadata_of
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import GgufFacts
from ryzanstein.worker.checkpoints.gguf.dialects.table import dialect_of_model
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.names import ROPE_FACTORS, is_stored_in_full
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Part
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.places import StoredPlace, by_stored, tensor_parts
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.checkpoints.gguf.rope_factors import part_factors, rope_factors
from ryzanstein.worker.checkpoints.gguf.rows import WINDOW_NUMBERS
from ryzanstein.worker.checkpoints.gguf.sampling import sampling_metadata
from ryzanstein.worker.checkpoints.gguf.small_blocks import Bytes, Numbers
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import vocabulary_metadata
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.checkpoints.tying import untied_where_stored, with_embedding
from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.kernels.functions.block_types import BlockType
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.model.loading import with_prefix
from ryzanstein.worker.refusal import CheckpointError

WRITTEN: Mapping[str, BlockType] = {
    kind.name.lower(): kind
    for kind in (
        *(block_types.F32, block_types.F16, block_types.BF16),
        *(block_types.Q8_0, block_types.Q4_0, block_types.Q4_K, block_types.Q6_K),
    )
}
"""The types that a file can be written in, by their names on the command line."""

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q6_K": 18, "BF16": 32}
"""`general.file_type`: llama.cpp's numbers for what most tensors are."""

_QUANTIZATION_VERSION = 2
_LARGEST_HALF = 65504.0
_STORED: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file, its type there, and the tensors of the checkpoint that it is made of."""

    place: StoredPlace
    planned: PlannedTensor
    entries: tuple[TensorEntry, ...]

    def windows(self) -> Iterator[Numbers]:
        """Yields the file's rows as float32, a window at a time. The rows of a vector are its numbers."""
        for part, entry in zip(self.place.parts, self.entries, strict=True):
            yield from _stored_rows(part, entry)

    def blocks(self) -> Iterator[Bytes]:
        """Yields the file's blocks. Raises CheckpointError for numbers that they cannot have."""
        for numbers in self.windows():
            self._refuse_beyond_range(numbers)
            yield quantize(numbers, self.planned.type)

    def _refuse_beyond_range(self, numbers: Numbers) -> None:
        kind = self.planned.type
        if kind in (block_types.F32, block_types.BF16):
            return
        largest = float(np.abs(numbers).max())
        if not largest <= _LARGEST_HALF:
            what = f"has a number of magnitude {largest:g}; {kind.name} has at most {_LARGEST_HALF:g}"
            entry = self.entries[0]
            raise CheckpointError(f"{entry.file}: tensor {entry.name} {what}: write bf16 or f32")


def _stored_rows(part: Part, entry: TensorEntry) -> Iterator[Numbers]:
    whole = _mapped(entry, (math.prod(part.shape) // part.width, part.width))
    own = whole[part.start : part.start + part.count]
    own, order = own.T if part.transposed else own, part.rows_of_source()
    step = max(1, WINDOW_NUMBERS // part.stored_width)
    for first in range(0, part.stored_count, step):
        rows = own[first : first + step] if order is None else own[order[first : first + step]]
        yield part.to_file(_floats(np.ascontiguousarray(rows), entry.dtype))


def _mapped(entry: TensorEntry, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns a tensor's numbers as they are stored, mapped from the file."""
    matrix = entry.columns_of
    if matrix is None:
        return np.memmap(entry.file, _STORED[entry.dtype], "r", offset=entry.offset, shape=shape)
    whole = np.memmap(matrix.file, _STORED[matrix.dtype], "r", offset=matrix.offset, shape=matrix.shape)
    end = entry.first_column + entry.step * entry.shape[0]
    return whole[:, entry.first_column : end : entry.step].T.reshape(shape)


def to_file(source: Path, target: Path, wanted: BlockType, out: TextIO, *, force: bool = False) -> None:
    """Writes the model of a directory as a GGUF file, complete or not at all.

    Raises ModelRefused; OSError. Progress is written to `out`.
    """
    spec, entries = _model(source)
    sparse = any(layer.experts for layer in spec.layers)
    dialect = dialect_of_model(spec.model_type, str(source / "config.json"), sparse=sparse)
    places = by_stored(tensor_parts(spec, tensor_shapes(spec), dialect))
    tensors = [_stored(entries, place, wanted, spec, source) for place in places]
    _refuse_unread(entries, spec)
    factors = _factors(spec)
    metadata = _metadata(source, places, dialect, wanted, factors)
    planned = [each.planned for each in tensors]
    if factors is not None:
        planned.append(PlannedTensor(ROPE_FACTORS, block_types.F32, factors.shape))
    progress = ConversionProgress(sum(tensor.num_bytes for tensor in planned), out)
    _tell_fallbacks(tensors, wanted, progress)
    with new_file(target, force=force) as file:
        write_header(file, metadata, planned)
        for each in tensors:
            write_tensor(file, each.planned, _counted(each, progress))
        if factors is not None:
            write_tensor(file, planned[-1], [factors.view(np.uint8)])
            progress.add(factors.nbytes, ROPE_FACTORS)


def _model(source: Path) -> tuple[DecoderSpec, Mapping[str, TensorEntry]]:
    config = read_config(source)
    refuse_quantized(config, str(source / "config.json"))
    spec = spec_of(config)
    entries = with_embedding(spec, with_prefix(read_tensor_files(source), spec.names))
    return untied_where_stored(spec, entries), entries


def _stored(
    entries: Mapping[str, TensorEntry], place: StoredPlace, wanted: BlockType, spec: DecoderSpec, model_dir: Path
) -> _Stored:
    found = tuple(_entry(entries, part, model_dir) for part in place.parts)
    return _Stored(place, PlannedTensor(place.name, _type_of(place, wanted, spec), place.shape), found)


def _entry(entries: Mapping[str, TensorEntry], part: Part, model_dir: Path) -> TensorEntry:
    entry = entries.get(part.source)
    if entry is None:
        raise CheckpointError(f"{model_dir}: tensor {part.source} is missing")
    if entry.shape != part.shape:
        shapes = f"has shape {list(entry.shape)}, config.json needs {list(part.shape)}"
        raise CheckpointError(f"{entry.file}: tensor {part.source} {shapes}")
    if entry.dtype not in _STORED:
        raise CheckpointError(f"{entry.file}: tensor {part.source} has dtype {entry.dtype}, which is not supported")
    return entry


def _type_of(place: StoredPlace, wanted: BlockType, spec: DecoderSpec) -> BlockType:
    """Returns the type of a tensor.

    Vectors, routers and learned positions are float32. The head has at least 6 bits, as in
    llama.cpp, and so has an embedding that is also the head.
    """
    if is_stored_in_full(place.name, place.shape):
        return block_types.F32
    head = "token_embd.weight" if spec.tied_head else "output.weight"
    if place.name == head and wanted in (block_types.Q4_0, block_types.Q4_K):
        wanted = block_types.Q6_K
    return stored_as(wanted, place.shape[-1])


def _refuse_unread(entries: Mapping[str, TensorEntry], spec: DecoderSpec) -> None:
    """Raises CheckpointError for a tensor that would be left out."""
    known = {*tensor_shapes(spec), f"{spec.names.head}.weight"}
    for name, entry in entries.items():
        if name not in known and not any(fnmatchcase(name, f"*{ending}") for ending in spec.names.ignored):
            raise CheckpointError(f"{entry.file}: tensor {name} is not used by this architecture")


def _factors(spec: DecoderSpec) -> Numbers | None:
    rotary = spec.rotaries[0] if spec.rotaries else None
    if rotary is not None and isinstance(rotary.scaling, PartScaling):
        return part_factors(rotary.scaling, rotary.dim)
    if rotary is None or not isinstance(rotary.scaling, Llama3Scaling):
        return None
    return rope_factors(rotary.scaling, rotary.theta, rotary.dim)


def _metadata(
    source: Path, places: list[StoredPlace], dialect: Dialect, wanted: BlockType, factors: Numbers | None
) -> Mapping[str, Value]:
    shapes = {place.name: place.shape for place in places}
    config = {**read_config(source), "tie_word_embeddings": "output.weight" not in shapes}
    facts = GgufFacts(str(source / "config.json"), {}, shapes, factors)
    general: dict[str, Value] = {
        "general.architecture": dialect.name,
        "general.type": "model",
        "general.name": source.resolve().name,
        "general.file_type": _FILE_TYPES[wanted.name],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    vocabulary = read_vocabulary(source, shapes["token_embd.weight"][0])
    general |= sampling_metadata(_generation(source / "generation_config.json"))
    return {**general, **metadata_of(config, facts, dialect), **vocabulary_metadata(vocabulary)}


def _generation(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path) if path.exists() else {}
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error}") from error


def _counted(source: _Stored, progress: ConversionProgress) -> Iterator[Bytes]:
    for blocks in source.blocks():
        yield blocks
        progress.add(blocks.nbytes, source.place.name)


def _tell_fallbacks(tensors: list[_Stored], wanted: BlockType, progress: ConversionProgress) -> None:
    """Says which tensors are stored otherwise than asked for, by type."""
    others: dict[BlockType, list[_Stored]] = {}
    for each in tensors:
        kind = each.planned.type
        if kind != wanted and not is_stored_in_full(each.place.name, each.place.shape):
            others.setdefault(kind, []).append(each)
    for kind, found in others.items():
        example = found[0].place
        rows = f"{len(found)} tensors, such as {example.name} with rows of {example.shape[-1]}"
        progress.note(f"{wanted.name.lower()}: stored as {kind.name}: {rows}")


def _floats(rows: np.ndarray[Any, np.dtype[Any]], dtype: str) -> Numbers:
    if dtype == "BF16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32)
