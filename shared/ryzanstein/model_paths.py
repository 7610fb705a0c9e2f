"""Where a model is: a directory in the Hugging Face layout, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

GGUF_SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a model is read as a GGUF file: by its name, unless that is a directory's."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """Returns the name of a model that is given no other: the directory's, or the file's without its suffix.

    A link gives its own name: what it leads to may be named by its content, as in a cache of models.
    """
    named = path.absolute()
    if named.name in ("", ".."):
        named = named.resolve()
    return named.stem if is_gguf(path) else named.name


def model_location(path: Path) -> Path:
    """Returns the path without links, so that a link that is changed does not change a model that is served.

    A link to a file without the suffix of a GGUF file stays: its name says what the file is.
    """
    resolved = path.resolve()
    return resolved if is_gguf(resolved) == is_gguf(path) else path.absolute()
