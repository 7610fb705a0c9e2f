"""What a format finds in a checkpoint: a quantized matrix, under its usual name, and the tensors that describe it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ryzanstein.worker.checkpoints.quantized_files.matrix import QuantizedMatrix
from ryzanstein.worker.checkpoints.quantized_files.stored_tensors import StoredTensors


@dataclass(frozen=True, slots=True)
class FoundMatrix:
    """`parts`: the stored tensors that nobody else reads."""

    name: str
    matrix: QuantizedMatrix
    parts: frozenset[str]


def modules_with(tensors: StoredTensors, suffix: str) -> Iterator[str]:
    """Yields the modules that have a tensor of this name, without the suffix."""
    return (name.removesuffix(suffix) for name in tensors.entries if name.endswith(suffix))
