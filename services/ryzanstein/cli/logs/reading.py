"""The logs of a state directory as one, in the order of time, also while their files are renamed."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain, count
from pathlib import Path

from ryzanstein.cli.logs.record import LogRecord, read_record
from ryzanstein.observe.log_files import older

_LOOK_S = 0.2


def service_names(directory: Path) -> list[str]:
    """Returns the services that have logged into the directory."""
    return sorted(path.name.removesuffix(".log") for path in directory.glob("*.log") if path.is_file())


@dataclass(slots=True)
class ServiceFiles:
    """The log of a service: its newest file, and those before it.

    A file that is open is read to its end whatever its name becomes meanwhile.
    """

    service: str
    path: Path
    _at: float = 0.0
    _rest: bytes = b""
    _file: BufferedReader | None = field(default=None)

    def past(self) -> Iterator[LogRecord]:
        """Yields what is there, the oldest first."""
        for opened in self._opened():
            if self._file is not None:
                self._file.close()
            self._file, self._rest = opened, b""
            yield from self.more()

    def more(self) -> Iterator[LogRecord]:
        """Yields what was written since, from the file that was read last."""
        while self._file is not None and (data := self._file.readline()):
            self._rest += data
            if self._rest.endswith(b"\n"):
                line, self._rest = self._rest, b""
                record = read_record(self.service, line.decode(errors="replace").rstrip("\n"), self._at)
                self._at = record.time
                yield record

    def new(self) -> Iterator[LogRecord]:
        """Yields what was written since, from the newest file too if that is another one."""
        yield from self.more()
        while (following := self._following()) is not None:
            yield from self.more()  # what was written right before the rename
            if self._file is not None:
                self._file.close()
            self._file, self._rest = following, b""
            yield from self.more()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> list[BufferedReader]:
        """Returns all files, opened at once: a rename meanwhile loses none, and shows none twice."""
        found: dict[int, BufferedReader] = {}
        for name in chain([str(self.path)], (older(str(self.path), number) for number in count(1))):
            try:
                opened = open(name, "rb")  # noqa: SIM115 - the caller closes it
            except FileNotFoundError:
                if name == str(self.path):  # just renamed, and the new file is not there yet
                    continue
                break
            inode = os.fstat(opened.fileno()).st_ino
            if inode in found:
                opened.close()
            else:
                found[inode] = opened
        return list(reversed(found.values()))

    def _following(self) -> BufferedReader | None:
        """Returns the file after the one that was read; None: there is none yet."""
        read = None if self._file is None else os.fstat(self._file.fileno()).st_ino
        opened = self._opened()
        inodes = [os.fstat(each.fileno()).st_ino for each in opened]
        # One that was read and is gone was the oldest: the one after it is now.
        number = inodes.index(read) + 1 if read in inodes else 0
        following = opened.pop(number) if number < len(opened) else None
        for each in opened:
            each.close()
        return following


def merged(files: list[ServiceFiles]) -> Iterator[LogRecord]:
    """Yields what all have logged, by time."""
    return heapq.merge(*(each.past() for each in files), key=lambda record: record.time)


def followed(files: list[ServiceFiles]) -> Iterator[LogRecord]:
    """Yields what all log from now on, until the caller stops."""
    while True:
        news = sorted((record for each in files for record in each.new()), key=lambda record: record.time)
        yield from news
        if not news:
            time.sleep(_LOOK_S)
