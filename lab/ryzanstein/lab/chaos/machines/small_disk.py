"""A directory on a separate disk that is small enough to fill."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from ryzanstein.lab.chaos.machines.network import NetworkImpossibleError, program

SIZE_BYTES = 32 * 2**20
_CHUNK_BYTES = 2**16
_FILLER = "filler"


class SmallDisk:
    """A tmpfs while in `with`. It needs the right to mount (root)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = (program("mount"), "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "ryzanstein-chaos", str(self._directory))
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise NetworkImpossibleError(f"mount: {done.stderr.strip()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        subprocess.run((program("umount"), "--lazy", str(self._directory)), check=False, capture_output=True)

    def fill(self) -> int:
        """Writes until the disk is full. Returns how many bytes that took."""
        written = 0
        with (self._directory / _FILLER).open("wb", buffering=0) as file:
            for size in (_CHUNK_BYTES, 1):
                try:
                    while True:
                        written += file.write(bytes(size))
                except OSError:
                    continue
        return written

    def empty(self) -> None:
        (self._directory / _FILLER).unlink(missing_ok=True)
