"""A lock for the state directory of `ryzanstein up`.

It is a locked file in the directory, with the holder's process id.

The kernel releases the lock when its holder dies, however it dies, so a leftover file is no
obstacle.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ryzanstein.cli.processes.ports import InUseError

LOCK_NAME = "lock"


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Holds the lock on the directory, which it creates for its owner alone if missing.

    Raises InUseError if another process holds the lock, or if the directory cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InUseError(
            f"the state directory {directory} cannot be used ({error.strerror}); choose another with --state-dir"
        ) from None
    try:
        _take(lock, directory)
        yield
    finally:
        os.close(lock)


def _take(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdecimal() else "another process"
        raise InUseError(
            f"the state directory {directory} is in use by {who}; stop it, or choose another with --state-dir"
        ) from None
    except OSError as error:
        raise InUseError(f"the state directory {directory} cannot be locked: {error.strerror}") from None
    with suppress(OSError):  # a full disk: the lock holds without a name in it
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
