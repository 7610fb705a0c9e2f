"""An adapter as a GGUF file that llama.cpp reads.

llama.cpp scales by alpha / rank of each tensor and knows no other scale: ours is in B, and alpha is the rank.
Rows are in the file's order, as those of the base's tensors are there.

Legend: R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.tools.convert.writer import PlannedTensor, write_header, write_tensor
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.table import dialect_of_model
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.part import Part
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.places import StoredPlace, by_stored, tensor_parts
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.checkpoints.gguf.small_blocks import Numbers
from ryzanstein.worker.kernels.functions.block_types import F32
from ryzanstein.worker.refusal import CheckpointError

Pair = tuple[Numbers, Numbers]
"""A [R, I], and B [O, R] with the scale in it."""


def places_of(base: Base) -> Sequence[StoredPlace]:
    """Returns where a GGUF file has the tensors of a base. Raises CheckpointError if none can have them."""
    if is_gguf(base.path):
        with GgufFile.open(base.path) as file:
            return by_stored(tensor_parts(base.spec, base.shapes, GgufDescription.of(file).dialect, file.tensors))
    return by_stored(tensor_parts(base.spec, base.shapes, _dialect(base)))


def _dialect(base: Base) -> Dialect:
    sparse = any(layer.experts for layer in base.spec.layers)
    return dialect_of_model(base.spec.model_type, str(base.path), sparse=sparse)


def architecture_of(base: Base) -> str:
    """Returns llama.cpp's name of the architecture."""
    if is_gguf(base.path):
        with GgufFile.open(base.path) as file:
            return GgufDescription.of(file).dialect.name
    return _dialect(base).name


def pairs_of(model: Any) -> dict[str, Pair]:
    """Returns the matrices of a model of peft, by the name of the weight that they adapt."""
    found: dict[str, Pair] = {}
    for path, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            a_RI, b_OR = (_numbers(each["default"].weight) for each in (module.lora_A, module.lora_B))
            found[f"{path}.weight"] = a_RI, b_OR * np.float32(module.scaling["default"])
    return found


def _numbers(tensor: Tensor) -> Numbers:
    numbers: Numbers = tensor.detach().float().numpy()
    return numbers


def write_gguf(file: Path, architecture: str, places: Sequence[StoredPlace], pairs: Mapping[str, Pair], name: str) -> None:
    """Writes an adapter. Raises CheckpointError if llama.cpp has no tensor for a part of it; OSError."""
    stored = dict(_stored(places, pairs))
    rank = next(iter(pairs.values()))[0].shape[0]
    metadata: dict[str, Value] = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    planned = [PlannedTensor(each, F32, numbers.shape) for each, numbers in stored.items()]
    with file.open("wb") as opened:
        write_header(opened, metadata, planned)
        for tensor in planned:
            write_tensor(opened, tensor, [np.ascontiguousarray(stored[tensor.name]).view(np.uint8)])


def _stored(places: Sequence[StoredPlace], pairs: Mapping[str, Pair]) -> Iterator[tuple[str, Numbers]]:
    left = set(pairs)
    for place in places:
        sources = {part.source for part in place.parts}
        if not sources & pairs.keys():
            continue
        if len(sources) > 1:
            raise CheckpointError(f"{place.name} of a GGUF file has several matrices, which an adapter cannot adapt apart")
        (source,) = sources
        left.discard(source)
        a_RI, b_OR = pairs[source]
        yield f"{place.name}.lora_a", _inputs(a_RI, place.parts[0])
        yield f"{place.name}.lora_b", np.concatenate([_rows(b_OR, part) for part in place.parts])
    if left:
        raise CheckpointError(f"{min(left)} has no counterpart in a GGUF file: no adapter for it can be written")


def _inputs(a_RI: Numbers, part: Part) -> Numbers:
    if part.change is not None:
        raise CheckpointError(f"{part.name} of a GGUF file has other numbers, which no adapter can adapt")
    return part.to_file(a_RI)


def _rows(b_OR: Numbers, part: Part) -> Numbers:
    if part.transposed:
        return b_OR
    own, order = b_OR[part.start : part.start + part.count], part.rows_of_source()
    return own if order is None else own[order]
