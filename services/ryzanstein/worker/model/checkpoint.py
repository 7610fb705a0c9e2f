"""Weights out of safetensors files. Checks everything before anything is allocated; then each rank reads only its slices.

Both passes are the construction of the decoder, with another source of weights: `check` builds it on the meta device, which
holds shapes and no numbers, `load` builds it in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ryzanstein.worker.model.refusal import CheckpointError
from ryzanstein.worker.model.tensor_files import TensorEntry, is_float


class CheckedWeights:
    """A WeightSource that allocates nothing: it knows of each tensor that it exists and fits, and adds up the bytes.

    Raises CheckpointError naming tensor and file.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], model_dir: Path, dtype: torch.dtype) -> None:
        self._entries, self._model_dir, self._dtype = entries, model_dir, dtype
        self._read: set[str] = set()
        self.nbytes = 0

    def new(self, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        self.nbytes += tensor.nbytes
        return tensor

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._model_dir}: tensor {name} is missing")
        if entry.shape != shape:
            raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json needs {list(shape)}")
        if not is_float(entry.dtype):
            raise CheckpointError(f"{entry.file}: tensor {name} has dtype {entry.dtype}, which is not known")
        self._read.add(name)

    def refuse_unread(self, ignored: Iterable[str]) -> None:
        """A tensor that no layer reads means another architecture: served without it, the model would be wrong."""
        patterns = [f"*{ending}" for ending in ignored]
        for name, entry in self._entries.items():
            if name not in self._read and not any(fnmatchcase(name, pattern) for pattern in patterns):
                raise CheckpointError(f"{entry.file}: tensor {name} is not one of this architecture's")


class MappedWeights:
    """A WeightSource over memory-mapped files, for a checkpoint that `CheckedWeights` found whole. A context manager."""

    def __init__(self, entries: Mapping[str, TensorEntry], dtype: torch.dtype, device: torch.device) -> None:
        self._entries, self._dtype, self._device = entries, dtype, device
        self._files = ExitStack()
        self._open = cache(self._open_file)

    def __enter__(self) -> MappedWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        stop = min(start + out.shape[dim], shape[dim])
        if stop <= start:
            return
        entry = self._entries[name]
        stored = self._open(entry.file).get_slice(entry.name)
        part = stored[start:stop] if dim == 0 else stored[:, start:stop]
        out.narrow(dim, 0, stop - start).copy_(part)

    def _open_file(self, path: Path) -> Any:
        return self._files.enter_context(safe_open(path, framework="pt"))
