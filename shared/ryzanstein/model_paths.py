"""Where a model is: a directory in the Hugging Face layout, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a model is read as a GGUF file: by its name, unless that is a directory's."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """Returns the name of a model that is given no other: the directory's, or the file's without its suffix."""
    return path.stem if is_gguf(path) else path.name
