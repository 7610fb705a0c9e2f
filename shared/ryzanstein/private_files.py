"""Files that hold what people said: only their owner reads them. What exists keeps the permissions that somebody gave it."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def private_folder(path: Path) -> None:
    """Makes it, and those above it that are missing. OSError: it cannot be made."""
    for missing in [folder for folder in (*reversed(path.parents), path) if not folder.is_dir()]:
        missing.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def private_file(path: Path) -> None:
    """Makes an empty one where there is none, in a private folder. SQLite gives the files beside it the same permissions."""
    private_folder(path.parent)
    os.close(opener(str(path), os.O_RDWR | os.O_CREAT))


def opener(path: str, flags: int) -> int:
    """For `open`: whoever makes the file makes it private."""
    return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
