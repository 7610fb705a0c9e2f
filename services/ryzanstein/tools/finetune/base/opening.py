"""The base of an adapter: a directory in the Hugging Face layout, quantized or not, or a GGUF file.

Its tensors have the names that transformers reads, and it is read with the worker's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ryzanstein.files.model_paths import is_gguf, model_location
from ryzanstein.tools.finetune.base.linear import BlocksWeight
from ryzanstein.worker.architectures.registry import read_config
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.text_half import text_half
from ryzanstein.worker.checkpoints.checkpoint import WeightFiles
from ryzanstein.worker.checkpoints.content import ModelContent, Seen
from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.model.gguf_files import open_gguf
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.model.loading import open_model
from ryzanstein.worker.products.blocks import pack, packed_bytes
from ryzanstein.worker.settings.options import RunnerOptions


@dataclass(frozen=True, slots=True)
class Base:
    """An opened model. `config` is its decoder's config.json, `digest` identifies its weights by content."""

    path: Path
    config: Mapping[str, Any]
    spec: DecoderSpec
    files: WeightFiles
    shapes: Mapping[str, tuple[int, ...]]
    digest: str
    native: NativeKernels | None

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Base]:
        """Opens a model and checks that it has every tensor. Raises ModelRefused, which names the file; OSError."""
        path = model_location(path)
        seen = Seen.of(path)
        spec, files = open_gguf(path) if is_gguf(path) else open_model(path)
        with closing(files):
            shapes = tensor_shapes(spec)
            for name, shape in shapes.items():
                files.check(name, shape)
            content = ModelContent.of(path, (file for _, file in files.places()), seen)
            native = open_kernels(RunnerOptions()).native
            yield cls(path, _config(path, spec), spec, files, shapes, content.digest.hex(), native)

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def floats(self, name: str) -> Tensor:
        """Returns a whole tensor in float32."""
        out = torch.zeros(self.shapes[name])
        self.files.read(name, self.shapes[name], out)
        return out

    def served(self, name: str) -> BlocksWeight | None:
        """Returns a matrix in its blocks, or None if it is stored in floats, or no kernel multiplies its blocks."""
        blocks = self.files.blocks(name) if self.native is not None and len(self.shapes[name]) == 2 else None
        if blocks is None or self.native is None or blocks.kind.name not in BLOCKS:
            return None
        memory = torch.zeros(packed_bytes(self.native.blocks, blocks.shape, blocks.kind), dtype=torch.uint8)
        return BlocksWeight(pack(self.native.blocks, [blocks], blocks.shape[0], memory), blocks.shape)


def _config(path: Path, spec: DecoderSpec) -> dict[str, Any]:
    """Returns the config of the decoder alone, without how its weights are stored."""
    if is_gguf(path):
        with GgufFile.open(path) as file:
            config = dict(GgufDescription.of(file).config)
    else:
        config = dict(text_half(read_config(path)))
    config.pop("quantization_config", None)
    return config | {"tie_word_embeddings": spec.tied_head}
