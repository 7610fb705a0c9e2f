"""The model that is quantized: a directory of safetensors, or a GGUF file read as floats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.tools.convert.to_checkpoint import read_model
from ryzanstein.tools.description import describe
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.tools.quantize.reading.walk import ALONE
from ryzanstein.worker.architectures.foreign import refuse_quantized
from ryzanstein.worker.architectures.registry import read_config, spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.checkpoint import WeightFiles
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.safetensors_files import STORED_DTYPES, SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.checkpoints.tying import untied_where_stored
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.model.decoder import DecoderLayer
from ryzanstein.worker.model.gguf_files import open_gguf
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.model.loading import with_prefix
from ryzanstein.worker.refusal import CheckpointError, excerpt


@dataclass(frozen=True, slots=True)
class Origin:
    """An opened model. `dtypes` are the floats in which its tensors are stored again."""

    path: Path
    config: Mapping[str, Any]
    spec: DecoderSpec
    files: WeightFiles
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Origin]:
        """Opens a model and checks that it has every tensor, and no other. Raises CheckpointError; OSError."""
        origin = _of_gguf(path) if is_gguf(path) else _of_directory(path)
        with closing(origin.files):
            _refuse_transposed(origin)
            for name, shape in origin.shapes.items():
                origin.files.check(name, shape)
            _refuse_unread(origin)
            yield origin

    @property
    def digest(self) -> str:
        """Identifies the model's files by name, size and time, not by their content."""
        found = sorted(_fingerprints(self.path))
        return hashlib.sha256(json.dumps([found, dict(self.config)], sort_keys=True).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """The bytes of its tensors when they are stored again."""
        return sum(torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def layer_matrices(self, index: int) -> list[str]:
        """Returns the names of a layer's plain matrices."""
        weights = LayerWeights(self.files)
        DecoderLayer(weights, ALONE, self.spec, index)
        return [name for site in weights.sites for name in site.matrices]

    def floats(self, name: str) -> Tensor:
        """Returns a whole tensor in float32."""
        out = torch.zeros(self.shapes[name])
        self.files.read(name, self.shapes[name], out)
        return out

    def describe(self, directory: Path) -> None:
        """Writes what a directory has besides config.json and weights: the tokenizer, its template, defaults."""
        describe(self.path, directory)


def _refuse_transposed(origin: Origin) -> None:
    """Raises CheckpointError for GPT-2: transformers and we read quantized matrices as [outputs, inputs] only."""
    if origin.spec.transposed:
        raise CheckpointError(
            f"{origin.path}: model_type {excerpt(origin.spec.model_type)} stores its matrices as [inputs, outputs], which "
            "nobody reads quantized: a GGUF file can have them in blocks (ryzanstein convert --type)"
        )


def _refuse_unread(origin: Origin) -> None:
    """Raises CheckpointError for a tensor that would be left out. A tied head's is the embedding's once more."""
    names = origin.spec.names
    patterns = [f"*{ending}" for ending in (*names.ignored, *([f"{names.head}.weight"] if origin.spec.tied_head else []))]
    for name, file in origin.files.places():
        if name not in origin.shapes and not any(fnmatchcase(name, pattern) for pattern in patterns):
            raise CheckpointError(f"{file}: tensor {name} is not used by this architecture")


def _fingerprints(path: Path) -> Iterator[tuple[str, int, int]]:
    for file in path.iterdir() if path.is_dir() else [path]:
        if file.is_file():
            status = file.stat()
            yield file.name, status.st_size, status.st_mtime_ns


def _of_directory(path: Path) -> Origin:
    config = read_config(path)
    refuse_quantized(config, str(path / "config.json"))
    spec = spec_of(config)
    entries = with_prefix(read_tensor_files(path), spec.names)
    spec = untied_where_stored(spec, entries)
    dtypes = {name: STORED_DTYPES.get(entry.dtype, torch.float32) for name, entry in entries.items()}
    return Origin(path, config, spec, SafetensorsFiles(path, entries), dtypes, tensor_shapes(spec))


def _of_gguf(path: Path) -> Origin:
    with GgufFile.open(path) as file:
        model = read_model(file, block_types.BF16)
        dtypes = {placed.place.source: STORED_DTYPES[placed.dtype.name] for placed in model.tensors}
    spec, files = open_gguf(path)
    return Origin(path, model.config, spec, files, dtypes, tensor_shapes(spec))
