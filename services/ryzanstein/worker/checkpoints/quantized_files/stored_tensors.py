"""The tensors of a checkpoint beside each other: found, checked by header alone, and read by region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ryzanstein.worker.checkpoints.safetensors_files import SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.refusal import CheckpointError

SCALE_DTYPES = ("F32", "F16", "BF16")

Span = tuple[int, int]
"""A start and a count."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """All tensors of a checkpoint, by name."""

    model_dir: Path
    entries: Mapping[str, TensorEntry]
    files: SafetensorsFiles

    def find(self, name: str) -> TensorEntry:
        """Raises CheckpointError if there is no such tensor."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.model_dir}: tensor {name} is missing")
        return entry

    def matrix(self, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """Returns the shape of a matrix of one of these dtypes that is not empty. Raises CheckpointError."""
        entry = self.find(name)
        if entry.dtype not in dtypes:
            raise self.error(name, f"has dtype {entry.dtype}, needs {' or '.join(dtypes)}")
        if len(entry.shape) != 2 or not all(entry.shape):
            raise self.error(name, f"has shape {list(entry.shape)}, needs two dimensions that are not empty")
        return entry.shape[0], entry.shape[1]

    def expect(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> TensorEntry:
        """Returns a tensor of one of these dtypes and shapes. Raises CheckpointError."""
        entry = self.find(name)
        if entry.dtype not in dtypes:
            raise self.error(name, f"has dtype {entry.dtype}, needs {' or '.join(dtypes)}")
        if entry.shape not in shapes:
            raise self.error(name, f"has shape {list(entry.shape)}, needs {' or '.join(str(list(shape)) for shape in shapes)}")
        return entry

    def whole(self, name: str) -> Tensor:
        """Returns all numbers of a small tensor, as one row."""
        shape = self.entries[name].shape
        return self.files.region(name, (0, shape[0] if shape else 1)).flatten()

    def error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.find(name).file}: tensor {name} {what}")
