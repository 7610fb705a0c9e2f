"""Certificates and keys as files: read within bounds, and no key that everybody can read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_FILE_BYTES = 2**20
_DATA = "..data"


class MaterialError(ValueError):
    """A set of files cannot be used. The message names the file and says why."""


def read_pem(path: Path, *, private: bool = False) -> bytes:
    """Returns the content of a file. Raises MaterialError, for a private key also if every user can read it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise MaterialError(f"{path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise MaterialError(f"{path}: has more than {_MAX_FILE_BYTES} bytes")
    if private and mode & 0o007:
        raise MaterialError(f"{path}: every user can read this private key; chmod 0600 it")
    return content


def current_folder(directory: Path) -> Path:
    """Returns the folder whose files belong together: Kubernetes replaces the link `..data` at once."""
    data = directory / _DATA
    return data.resolve() if data.exists() else directory.resolve()


@contextmanager
def as_path(content: bytes) -> Iterator[str]:
    """Yields a path at which this process finds the bytes, which are on no disk: Python's `ssl` reads keys from paths alone."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
