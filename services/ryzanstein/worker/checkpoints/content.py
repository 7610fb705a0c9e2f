"""What tells the contents of a model's files apart: a digest of their sizes and of samples.

Ranks compare it before they load anything, nodes in what they say of their numerics, and a node when
its ranks return. It has no names and no places, so that copies are the same, and reads little: other
weights differ nearly everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ryzanstein.worker.refusal import CheckpointError

Stat = tuple[int, int, int]
"""Size, time of the last change and number of a file."""
DIGEST_BYTES = 8
_NONE: Stat = (-1, -1, -1)
_ALONGSIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_HEAD_BYTES = 64 * 2**10
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True, slots=True)
class ModelContent:
    """The digest of a model's files, and what changes when one of them is written or replaced."""

    digest: bytes
    files: tuple[Path, ...]
    stats: tuple[Stat, ...]

    @classmethod
    def of(cls, model: Path, weights: Iterable[str], seen: Seen) -> ModelContent:
        """Reads samples of the files that have the weights, and of those beside them.

        `seen` is what `Seen.of` returned before their headers were read. Raises CheckpointError, also if one of them
        has changed since.
        """
        alongside = [model / name for name in _ALONGSIDE] if model.is_dir() else []
        files = (*map(Path, sorted(set(weights))), *(path for path in alongside if path.is_file()))
        stats, digest = seen.unchanged(model, files), hashlib.blake2b(digest_size=DIGEST_BYTES)
        for path, (size, *_) in zip(files, stats, strict=True):
            digest.update(size.to_bytes(8, "big"))
            with _opened(path) as file:
                for offset, count in _samples(size):
                    digest.update(os.pread(file.fileno(), count, offset))
        return cls(digest.digest(), files, stats)

    def refuse_change(self, model: Path) -> None:
        """Raises CheckpointError if a file has been written or replaced since."""
        if tuple(map(_stat, self.files)) != self.stats:
            raise changed(model)


@dataclass(frozen=True, slots=True)
class Seen:
    """The files of a model as they are at one moment."""

    stats: Mapping[Path, Stat]

    @classmethod
    def of(cls, model: Path) -> Seen:
        paths = model.iterdir() if model.is_dir() else (model,)
        return cls({path: stat for path in paths if (stat := _stat(path)) != _NONE})

    def unchanged(self, model: Path, files: Sequence[Path]) -> tuple[Stat, ...]:
        """Returns what is known of these files. Raises CheckpointError if one of them has changed since."""
        stats = tuple(map(_stat, files))
        if any(self.stats.get(path) != stat for path, stat in zip(files, stats, strict=True)):
            raise changed(model)
        return stats


def changed(model: Path) -> CheckpointError:
    return CheckpointError(f"{model}: its files changed while they were read: load the model again when they are whole")


def _samples(size: int) -> list[tuple[int, int]]:
    """Returns offsets and lengths: the beginning of a file, which says what is in it, places spread over it, and its end."""
    if size <= _HEAD_BYTES + _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    places = range(_HEAD_BYTES, size, (size - _HEAD_BYTES) // _SAMPLES)
    return [(0, _HEAD_BYTES), *((place, _SAMPLE_BYTES) for place in places), (size - _SAMPLE_BYTES, _SAMPLE_BYTES)]


def _stat(path: Path) -> Stat:
    try:
        found = os.stat(path)
    except OSError:
        return _NONE
    return found.st_size, found.st_mtime_ns, found.st_ino


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
