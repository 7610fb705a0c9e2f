"""The digest of a checkpoint's weights: nodes with the same digest compute the same keys and values.

It covers the whole content of the weights and of config.json, and no path or file name, so that
copies in different folders are the same.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

_READ_BYTES = 4 * 2**20
_SUFFIXES = (".safetensors", ".gguf")


def weights_digest(model: Path) -> bytes:
    """Returns the digest of a directory or GGUF file.

    Computed once for files that have not changed; that reads everything, about a gigabyte a second:
    call it in a thread. Raises OSError.
    """
    stats = [(path, path.stat()) for path in _files(model)]
    return _digest(tuple((path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats))


@lru_cache(maxsize=64)
def _digest(files: tuple[tuple[Path, int, int, int], ...]) -> bytes:
    digest = hashlib.sha256()
    for path, size, *_ in files:
        digest.update(size.to_bytes(8, "big"))
        _add(path, digest)
    return digest.digest()


def _files(model: Path) -> list[Path]:
    if not model.is_dir():
        return [model]
    return [*sorted(path for path in model.iterdir() if path.suffix in _SUFFIXES), model / "config.json"]


def _add(path: Path, digest: hashlib._Hash) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
