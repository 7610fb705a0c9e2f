"""The list that a written directory carries of its own files, so that nothing else in it is ever removed."""

from __future__ import annotations

import json
from pathlib import Path

from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.refusal import ModelRefused

MARK = ".written-by-ryzanstein"
_LISTED = 3


def mark(directory: Path) -> None:
    """Writes the list of the files that are there, with their sizes. Raises OSError."""
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.name != MARK}
    (directory / MARK).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def refuse_foreign(directory: Path) -> None:
    """Raises ModelRefused unless a directory has the files that were written there, unchanged, and no others."""
    try:
        written = read_object(directory / MARK).get("files")
    except (UnreadableFile, OSError):
        written = None
    if not isinstance(written, dict):
        raise ModelRefused(
            f"{directory} was not written by ryzanstein (no {MARK}) and is not replaced: remove it, or choose another name"
        )
    foreign = [path.name for path in sorted(directory.iterdir()) if path.name != MARK and not _is_written(path, written)]
    if foreign:
        more = f" and {len(foreign) - _LISTED} more" if len(foreign) > _LISTED else ""
        raise ModelRefused(
            f"{directory} has files that ryzanstein did not write, or that changed since "
            f"({', '.join(foreign[:_LISTED])}{more}), and is not replaced: move them, or choose another name"
        )


def _is_written(path: Path, written: dict[str, object]) -> bool:
    return path.is_file() and not path.is_symlink() and written.get(path.name) == path.stat().st_size
