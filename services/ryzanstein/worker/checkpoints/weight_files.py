"""The files of a checkpoint's weights, and whether they changed since they were loaded.

That is told by comparing what the file system says of them at two moments, never with a clock of
this host: the files may be on a server whose clock differs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_SUFFIXES = (".safetensors", ".gguf")


def weight_files(model: Path) -> list[Path]:
    """Returns the files of a directory, or the GGUF file. Raises OSError."""
    if not model.is_dir():
        return [model]
    return [*sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES), model / "config.json"]


def stamp(model: Path) -> str:
    """Returns what is another text after any change of the files. Raises OSError."""
    digest = hashlib.sha256()
    for path in weight_files(model):
        status = path.stat()
        known = (path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        digest.update(repr(known).encode())
    return digest.hexdigest()[:32]
