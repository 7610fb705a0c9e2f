"""Whether a directory's file system has room for what a cluster writes at once: databases and logs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ryzanstein.cli.processes.ports import InUseError

_LEAST_BYTES = 4 * 2**20


def no_room(directory: Path, option: str) -> str:
    """Returns a sentence if there is no room, else nothing. `option` chooses another directory."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return f"{directory} cannot be used: {error.strerror}; choose another directory with {option}"
    free = found.f_bavail * found.f_frsize
    if free >= _LEAST_BYTES:
        return ""
    return f"the file system of {directory} has only {free // 1024} KiB left: free some, or choose another with {option}"


def require_room(directory: Path, option: str) -> None:
    """Raises InUseError, with a sentence, if there is no room."""
    if lack := no_room(directory, option):
        raise InUseError(lack)


def temporary_directory(prefix: str) -> Path:
    """Returns a new directory that its caller removes. Raises InUseError if there is none, or no room in it."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise InUseError(f"no temporary directory can be made ({error.strerror}): name one with TMPDIR") from None
    try:
        require_room(directory.parent, "TMPDIR")
    except InUseError:
        directory.rmdir()
        raise
    return directory
