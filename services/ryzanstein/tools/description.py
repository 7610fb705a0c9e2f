"""What a model's directory has besides config.json and weights: tokenizer, chat template, defaults of sampling."""

from __future__ import annotations

import shutil
from pathlib import Path

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.tools.convert.to_checkpoint import read_model, write_description
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions import block_types

_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_INDEX = ".index.json"


def describe(model: Path, directory: Path) -> None:
    """Writes what describes a model, a directory or a GGUF file, into another directory. Raises ModelRefused; OSError."""
    if is_gguf(model):
        with GgufFile.open(model) as opened:
            write_description(read_model(opened, block_types.BF16), directory, str(model))
        return
    for file in sorted(model.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != "config.json" and not file.name.endswith(_INDEX):
            shutil.copyfile(file, directory / file.name)
