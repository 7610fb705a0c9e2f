"""A folder for the state of a cluster that was given none: conversations must not outlive it there.

It goes with the cluster. A process that is killed cannot remove anything: the next cluster removes
the folder of this user whose lock nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ryzanstein.cli.processes.disk_room import temporary_directory

_PREFIX = "ryzanstein-"
_LOCK = "owner"


class TemporaryState:
    """A new folder, readable only by its owner, and a lock on it for as long as this process lives."""

    def __init__(self) -> None:
        with suppress(FileNotFoundError):  # there is no such folder: the next line says so
            remove_left()
        self.path = temporary_directory(_PREFIX)
        self._lock = os.open(self.path / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Runs something short to its end: KeyboardInterrupt is raised after it. In other threads than the first it never is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts and callable(before):
        before(signal.SIGINT, None)


def remove_left() -> None:
    """Removes the folders of processes that have ended. What belongs to other users is not touched."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is just being removed by somebody else
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_unowned(path)


def _remove_unowned(path: Path) -> None:
    """Removes a folder whose lock is free, unless it is so new that nobody has written into the lock yet."""
    lock = os.open(path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_size:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
