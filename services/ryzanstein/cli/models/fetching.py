"""What the ways to fetch a model have in common."""

from __future__ import annotations

import shutil
from pathlib import Path


class FetchError(Exception):
    """A model could not be fetched. The message is a sentence for the user."""


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files below a directory; 0 if there is none."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path] if path.exists() else []
    return sum(each.stat().st_size for each in files)


def require_room(folder: Path, num_bytes: int) -> None:
    """Raises FetchError if the folder's disk has less free space than this."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise FetchError(f"{folder} has {free / 1e9:.1f} GB of free space; this needs {num_bytes / 1e9:.1f} GB")
