"""Where a model is: a directory in the Hugging Face layout, or a GGUF file.

Both may lie in a cache of the Hugging Face hub, where a repository `org/name` is a directory
`models--org--name` with its files in `snapshots/COMMIT`, links to `blobs/SHA256`.
"""

from __future__ import annotations

import os
from pathlib import Path

GGUF_SUFFIX = ".gguf"
_GGUF_MAGIC = b"GGUF"
_REPOSITORY = "models--"


def is_gguf(path: Path) -> bool:
    """Whether a model is read as a GGUF file: by its name, or by its first bytes where its name is a digest."""
    if os.path.isdir(path):  # False also for a loop of links, or a name that is too long
        return False
    return path.suffix == GGUF_SUFFIX or _begins_as_gguf(path)


def model_name(path: Path) -> str:
    """Returns the name of a model that is given no other: the directory's, or the file's without its suffix.

    A link gives its own name: what it leads to may be named by its content, as in a cache of models. A
    snapshot in such a cache gives the name of its repository, without the organization.
    """
    named = path.absolute()
    if named.name in ("", ".", ".."):
        named = Path(os.path.realpath(named))
    if is_gguf(path):
        return named.name.removesuffix(GGUF_SUFFIX)
    repository = next((each for each in (named, named.parent.parent) if _is_repository(each)), None)
    return named.name if repository is None else repository.name.rpartition("--")[2]


def model_location(path: Path) -> Path:
    """Returns the path without links, so that a link that is changed does not change a model that is served.

    A repository in a cache of models is the snapshot that its branch `main` has, or its only one. A link
    to what is a GGUF file by neither its name nor its first bytes stays: its own name says what it is.
    """
    if _is_repository(path.absolute()):
        path = _snapshot(path) or path
    resolved = Path(os.path.realpath(path))
    return resolved if is_gguf(resolved) == is_gguf(path) else path.absolute()


def _is_repository(path: Path) -> bool:
    return path.name.startswith(_REPOSITORY) and os.path.isdir(path / "snapshots")


def _snapshot(repository: Path) -> Path | None:
    try:
        return repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        snapshots = list((repository / "snapshots").iterdir())
        return snapshots[0] if len(snapshots) == 1 else None


def _begins_as_gguf(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False
