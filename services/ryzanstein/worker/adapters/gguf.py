"""Reads an adapter in a GGUF file, as llama.cpp's `convert_lora_to_gguf.py` and `ryzanstein finetune --gguf` write them.

Its tensors are named by those of a GGUF file of the base, and have their rows in its order: both are turned back here. As in a
directory, all of the file must land on weights. The base may be such a file or a directory.

Legend: I inputs, R ranks, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.worker.adapters.config import MAX_RANK, REFUSED
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter, Shapes
from ryzanstein.worker.adapters.names import is_embedding, is_head
from ryzanstein.worker.adapters.tensors import Floats
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.architectures.registry import read_config, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.table import dialect_of_model
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Part
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.places import by_source, tensor_parts
from ryzanstein.worker.checkpoints.gguf.file import GgufFile, GgufTensor
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, ModelRefused

_ALPHA, _INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_A, _B = ".lora_a", ".lora_b"


def read_gguf_adapter(path: Path, adaptable: Shapes, base: Path) -> Adapter:
    """Returns the adapter in a file, for the model at `base` with these weights.

    Raises AdapterUnfit, which names the tensor or the key of the metadata that is at fault.
    """
    try:
        with GgufFile.open(path) as file:
            model = _Base.of(base, adaptable)
            alpha = _alpha(file.metadata, model.dialect)
            stored = {name: _Factors.of(name, tensors, alpha) for name, tensors in _pairs(file.tensors).items()}
            weights = dict(_weights(model.places, stored))
            name = file.metadata.get("general.base_model.0.name")
    except CheckpointError as error:
        raise AdapterUnfit("", str(error)) from error
    return Adapter(weights, name if isinstance(name, str) else "")


@dataclass(frozen=True, slots=True)
class _Base:
    """Where a GGUF file of the model has its weights, by their names in the checkpoint."""

    dialect: Dialect
    places: Mapping[str, tuple[Part, ...]]

    @classmethod
    def of(cls, path: Path, adaptable: Shapes) -> _Base:
        if is_gguf(path):
            with GgufFile.open(path) as file:
                described, tensors = GgufDescription.of(file), dict(file.tensors)
            spec, dialect = spec_of(described.config), described.dialect
        else:
            spec, tensors = _spec_of(path), {}
            sparse = any(layer.experts for layer in spec.layers)
            dialect = dialect_of_model(spec.model_type, str(path), sparse=sparse)
        shapes = {f"{name}.weight": _shape_of(name, shape, spec) for name, shape in adaptable.items()}
        return cls(dialect, by_source(tensor_parts(spec, shapes, dialect, tensors)))


def _spec_of(path: Path) -> DecoderSpec:
    try:
        return spec_of(read_config(path))
    except ModelRefused as error:
        raise CheckpointError(str(error)) from error


def _shape_of(name: str, shape: tuple[int, int], spec: DecoderSpec) -> tuple[int, int]:
    """Returns the shape of a weight in its checkpoint."""
    has_inputs_first = is_embedding(name) or (spec.transposed and not is_head(name))
    return shape if has_inputs_first else shape[::-1]


def _alpha(metadata: Mapping[str, Value], dialect: Dialect) -> float:
    """Returns what, over its rank, a pair of factors is multiplied by; 0: nothing is divided, as in llama.cpp."""
    expected = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": dialect.name}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise AdapterUnfit(key, f"is {str(metadata.get(key, 'missing'))[:64]!r}, must be {value!r}")
    if _INVOCATION in metadata:
        raise AdapterUnfit(_INVOCATION, REFUSED["alora_invocation_tokens"])
    alpha = metadata.get(_ALPHA)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterUnfit(_ALPHA, "must be a finite number")
    return float(alpha)


def _pairs(tensors: Mapping[str, GgufTensor]) -> Mapping[str, dict[str, GgufTensor]]:
    """Returns the factors of each tensor of the base."""
    found: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in tensors.items():
        end = name[-len(_A) :]
        if end not in (_A, _B):
            raise AdapterUnfit(name, "is no factor of a tensor")
        found.setdefault(name.removesuffix(end), {})[end] = tensor
    if not found:
        raise AdapterUnfit("", "the file has no tensors")
    return found


@dataclass(frozen=True, slots=True)
class _Factors:
    """Two factors as they are stored, [R, I] and [O, R], and what their product is multiplied by.

    Of an embedding they are [tokens, R] and [width, R].
    """

    name: str
    first: Floats
    second: Floats
    scale: float

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, GgufTensor], alpha: float) -> _Factors:
        for end, other in ((_A, _B), (_B, _A)):
            if end not in tensors:
                raise AdapterUnfit(name + other, "the other factor is missing")
            if len(tensors[end].shape) != 2:
                raise AdapterUnfit(name + end, f"has shape {list(tensors[end].shape)}: experts take no adapter here")
        rank = tensors[_B].shape[1]
        if rank > MAX_RANK:
            raise AdapterUnfit(name + _B, f"has rank {rank}, at most {MAX_RANK} are served")
        return cls(name, _numbers(tensors[_A]), _numbers(tensors[_B]), alpha / rank if alpha else 1.0)

    @property
    def rank(self) -> int:
        return int(self.second.shape[1])

    def check(self, ours: tuple[int, ...], theirs: tuple[int, ...], end: str) -> None:
        """Raises AdapterUnfit unless a factor has the shape that the tensor of the base asks for."""
        if ours != theirs:
            raise AdapterUnfit(self.name + end, f"has shape {list(ours)}, must be {list(theirs)}")


def _numbers(tensor: GgufTensor) -> Floats:
    numbers = dequantize(tensor.blocks, tensor.type).astype(np.float32).reshape(tensor.shape)
    if not np.isfinite(numbers).all():
        raise AdapterUnfit(tensor.name, "has numbers that are not finite")
    return numbers


def _weights(places: Mapping[str, Sequence[Part]], stored: Mapping[str, _Factors]) -> Iterator[tuple[str, AdaptedWeight]]:
    """Yields the factors of each weight that has some, by its name. Raises AdapterUnfit if any are left over."""
    left = set(stored)
    for source, parts in places.items():
        if any(part.name in stored for part in parts):
            left -= {part.name for part in parts}
            name = source.removesuffix(".weight")
            yield name, _embedding(parts[0], stored) if is_embedding(name) else _linear(parts, stored)
    if left:
        raise AdapterUnfit(min(left) + _A, "is of no tensor of the base that takes an adapter")


def _embedding(part: Part, stored: Mapping[str, _Factors]) -> AdaptedWeight:
    found = stored[part.name]
    tokens, width = part.shape
    found.check(found.first.shape, (tokens, found.rank), _A)
    found.check(found.second.shape, (width, found.rank), _B)
    return AdaptedWeight(np.ascontiguousarray(found.first.T), found.second, None, found.scale)


def _linear(parts: Sequence[Part], stored: Mapping[str, _Factors]) -> AdaptedWeight:
    """Returns the factors of a weight. Those of several tensors of the file stand beside each other, with zeros between."""
    members = list(dict.fromkeys(part.name for part in parts if part.name in stored))
    by_name = {name: [part for part in parts if part.name == name] for name in members}
    alone = len(members) == 1
    first_RI = [_inputs(stored[name], by_name[name][0]) for name in members]
    begins = np.cumsum([0, *(stored[name].rank for name in members)])
    num_outputs = parts[0].shape[-1] if parts[0].transposed else parts[0].shape[0]
    b_OR = np.zeros((num_outputs, begins[-1]), np.float32)
    for name, begin in zip(members, begins, strict=False):
        found = stored[name]
        for part in by_name[name]:
            rows = slice(None) if part.transposed else slice(part.start, part.start + part.count)
            scale = np.float32(1 if alone else found.scale)
            b_OR[rows, begin : begin + found.rank] = _outputs(found, part) * scale
    return AdaptedWeight(np.concatenate(first_RI), b_OR, None, stored[members[0]].scale if alone else 1.0)


def _inputs(found: _Factors, part: Part) -> Floats:
    """Returns A in the order of the checkpoint."""
    if part.change is not None or (part.transposed and part.count != part.shape[0]):
        raise AdapterUnfit(found.name + _A, "is of a tensor whose numbers the file has otherwise: it takes no adapter here")
    num_inputs = part.shape[0] if part.transposed else part.width
    found.check(found.first.shape, (found.rank, num_inputs), _A)
    return part.from_file(found.first)


def _outputs(found: _Factors, part: Part) -> Floats:
    """Returns the rows of B that are a part's, in the order of the checkpoint."""
    num_outputs = part.stored_shape[-2] if len(part.stored_shape) > 1 else 1  # the gate of a shared expert is a vector
    found.check(found.second.shape, (num_outputs, found.rank), _B)
    if part.transposed:
        return found.second
    rows_OR, order = found.second[part.first : part.first + part.count], part.rows_of_file()
    return rows_OR if order is None else rows_OR[order]
