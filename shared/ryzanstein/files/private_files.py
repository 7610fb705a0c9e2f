"""Files with users' text, readable only by their owner. Existing files keep their permissions."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600


def private_folder(path: Path) -> None:
    """Creates a folder and its missing parents. Raises OSError."""
    for missing in [folder for folder in (*reversed(path.parents), path) if not folder.is_dir()]:
        missing.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def private_file(path: Path) -> None:
    """Creates an empty file, if it is missing, in a private folder.

    SQLite gives the files beside it the same permissions.
    """
    private_folder(path.parent)
    os.close(opener(str(path), os.O_RDWR | os.O_CREAT))


def opener(path: str, flags: int) -> int:
    """Opens a file, private if it is created. For `open`."""
    return os.open(path, flags | os.O_CLOEXEC, _FILE_MODE)
