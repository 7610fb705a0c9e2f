"""Output that is complete or not there: written under a temporary name beside its place, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ryzanstein.tools.written import mark, refuse_foreign
from ryzanstein.worker.refusal import ModelRefused

_GGUF = b"GGUF"


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Opens a file that appears as `path` when the block ends, and not at all if it raises.

    Raises ModelRefused if there is something already and `force` is false, or it is no GGUF file; OSError.
    """
    _refuse_existing(path, force=force)
    _refuse_other_file(path)
    partial = _sibling(path, "partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def new_directory(path: Path, *, force: bool) -> Iterator[Path]:
    """Yields an empty directory that appears as `path` when the block ends, and not at all if it raises.

    Only an empty directory is replaced, or, if `force` is true, one that was written in this way and
    holds nothing else: anything else there is somebody's. Raises ModelRefused; OSError.
    """
    refuse_place(path, force=force)
    path = path.resolve()
    partial = _sibling(path, "partial")
    try:
        partial.mkdir()
        yield partial
        put_in_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_place(path: Path, *, force: bool) -> None:
    """Raises ModelRefused if `new_directory` would refuse to write there."""
    if path.name in ("", ".."):
        raise ModelRefused(f"{path}: a directory is written under its name, which is missing here")
    if path.is_symlink() and not path.exists():
        raise ModelRefused(f"{path} is a link to nothing")
    is_empty = path.is_dir() and not any(path.iterdir())
    _refuse_existing(path, force=force or is_empty)
    if path.exists() and not path.is_dir():
        raise ModelRefused(f"{path} is not a directory, and is not replaced")
    if path.exists() and not is_empty:
        refuse_foreign(path)


def put_in_place(partial: Path, path: Path) -> None:
    """Moves a complete directory to `path`, once its files are on the disk; replaces what `refuse_place` lets pass.

    `path` is no link: resolve it first. What was there before stays if anything fails. Raises
    ModelRefused if somebody has written there meanwhile; OSError.
    """
    mark(partial)
    for file in partial.iterdir():
        sync(file)
    sync(partial)
    _replace(partial, path)
    sync(path.parent)


def _refuse_existing(path: Path, *, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise ModelRefused(f"{path} exists already; --force replaces it")
    if not path.parent.is_dir():
        raise ModelRefused(f"{path.parent} is not a directory")


def _refuse_other_file(path: Path) -> None:
    """Raises ModelRefused for something at `path` that is no GGUF file."""
    if path.is_dir():
        raise ModelRefused(f"{path} is a directory, and a GGUF file is written")
    if path.exists() and not (path.is_file() and _begins_with(path, _GGUF)):
        raise ModelRefused(f"{path} is not a GGUF file and is not replaced: remove it, or choose another name")


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) in (magic, b"")


def _replace(partial: Path, path: Path) -> None:
    """Renames a directory over another: the old one is put aside until the new one is in its place."""
    if not os.path.lexists(path):
        partial.rename(path)
        return
    aside = _sibling(path, "replaced")
    try:
        path.rename(aside)
        if any(aside.iterdir()):
            refuse_foreign(aside)  # it had another name when it was asked before, and others knew it
        partial.rename(path)
    except BaseException:
        if os.path.lexists(aside) and not os.path.lexists(path):
            aside.rename(path)
        raise
    shutil.rmtree(aside)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sibling(path: Path, kind: str) -> Path:
    """Returns a name that is not taken. It is known before it is used, so that no interruption leaves it unknown."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")
