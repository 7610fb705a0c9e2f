"""The file that a process's standard error is redirected to, continued in a new one when it is large.

`router-0.log` becomes `router-0.log.1`, that becomes `.2`, and so on; the oldest is removed. Several
processes may write to one file: whoever finds it full renames it, the others follow by its name.
Nothing is copied, and every record is written whole to one file or the other, so no line is lost,
and those of a crash are in the newest file. It imports little of the standard library and nothing
else, because a small process beside each service imports it: see `native_lines`.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE = 0o600


class Rotation(NamedTuple):
    """How large a file becomes (0: files are never continued), and how many older ones are kept."""

    max_bytes: int = 0
    num_older: int = 1


class LogFile(io.FileIO):
    """A descriptor that logs are written to. Only a regular file is continued in another one.

    What goes wrong with that is not reported, because there is no place for it: the file grows then.
    """

    def __init__(self, descriptor: int, rotation: Rotation) -> None:
        super().__init__(descriptor, "w")
        self._rotation = rotation
        self._path = _path_of(descriptor) if rotation.max_bytes else None

    def write(self, data: ReadableBuffer, /) -> int:
        if self._path is not None:
            with suppress(OSError):
                self._continue(self._path)
        return super().write(data)

    def _continue(self, path: str) -> None:
        """Makes the descriptor that of the file which has the name now, after a rename if that one is full."""
        if _is_file(path, self.fileno()):
            if os.fstat(self.fileno()).st_size < self._rotation.max_bytes:
                return
            with _alone(os.path.dirname(path)) as alone:
                if not alone:  # another process renames right now: it is followed with the next record
                    return
                if _is_file(path, self.fileno()):
                    _rename(path, self._rotation.num_older)
        newest = os.open(path, _FLAGS, _MODE)
        try:
            os.dup2(newest, self.fileno(), inheritable=False)
        finally:
            os.close(newest)


def older(path: str, number: int) -> str:
    """Returns the name of the file before the newest (1), or before that one (2), and so on."""
    return f"{path}.{number}"


def _path_of(descriptor: int) -> str | None:
    """Returns the name of an open regular file; None for anything else, and for a file that has lost its name."""
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return path if regular and _is_file(path, descriptor) else None
    except OSError:
        return None


def _is_file(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _rename(path: str, num_older: int) -> None:
    for number in range(num_older - 1, 0, -1):
        if os.path.exists(older(path, number)):
            os.replace(older(path, number), older(path, number + 1))
    os.replace(path, older(path, 1))


@contextmanager
def _alone(directory: str) -> Iterator[bool]:
    """Yields whether no other process renames files in the directory meanwhile. Never waits."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


class LineWriter:
    """A log's whole lines, written with `write`, which may raise OSError: this never raises.

    A full disk, or a reader that is gone, must not end a service: lines that cannot be written are
    lost. The first one that can be written again follows a record of how many were. `on_lost` is called for
    each of them.

    Threads wait for each other. A line that comes while the same thread writes one is written after it:
    the garbage collector runs anywhere, and what it ends may log. A lock would never be released then.
    """

    def __init__(
        self,
        write: Callable[[memoryview], int | None],
        fields: Mapping[str, str | int],
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._write, self._fields, self._on_lost = write, fields, on_lost
        self._lock = RLock()
        self._waiting: deque[bytes] = deque()
        self._writing = False
        self._lost = 0
        self._torn = False

    def put(self, line: bytes) -> None:
        """Writes a line in one piece, so that lines of several writers do not mix."""
        with self._lock:
            self._waiting.append(line)
            if self._writing:
                return
            self._writing = True
            try:
                while self._waiting:
                    self._put(self._waiting.popleft())
            finally:
                self._writing = False

    def _put(self, line: bytes) -> None:
        if self._lost:
            event = {"event": f"log lines lost: {self._lost}", "level": "warning", "timestamp": timestamp()}
            line = b"\n" * self._torn + json.dumps({**self._fields, **event}).encode() + b"\n" + line
        rest = memoryview(line)
        with suppress(OSError):
            while rest and (written := self._write(rest)):
                rest = rest[written:]
        if rest:
            self._torn = self._torn or len(rest) < len(line)
            self._lost += 1
            self._on_lost()
        else:
            self._lost, self._torn = 0, False


def timestamp() -> str:
    """Returns the time of a record, as the log writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
