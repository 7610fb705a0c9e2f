"""The keys file: who may read it, how it is read, and how commands append to it.

Nobody but its owner and its group may read it, and nobody but its owner may write it: mode 0600, 0400,
0640 or 0440. Kubernetes mounts a Secret with 0440 for the group of a pod. Links are followed each time.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.auth.keys.key_fields import check_new
from ryzanstein.auth.keys.keys_text import (
    MAX_FILE_BYTES,
    KeysText,
    KeysTextError,
    key_text,
    read_appended,
    read_keys,
    revoked_text,
)
from ryzanstein.auth.keys.records import MAX_KEYS, KeyRecord, KeySnapshot
from ryzanstein.files.private_files import opener, private_folder

_FORBIDDEN = stat.S_IWGRP | stat.S_IRWXO
_PIECE = 2**20


class KeysFileError(Exception):
    """A keys file cannot be used. The message has its path, and the line where that is known."""


class NoSuchKeyError(Exception):
    """No key has this id."""


class KeyExistsError(Exception):
    """A key has this id."""


@dataclass(frozen=True, slots=True)
class KeysFile:
    """A keys file at a path. Raises KeysFileError wherever it cannot be read or written."""

    path: Path

    def stamp(self) -> tuple[int, ...]:
        """Returns what changes when the file does: without reading it."""
        with self._failures():
            found = os.stat(self.path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode

    def content(self) -> bytes:
        """Returns the file's bytes; at most one more than may be read."""
        with self._failures():
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._check(descriptor)
                return _all(descriptor)
            finally:
                os.close(descriptor)

    def parsed(self, content: bytes) -> KeysText:
        """Returns what a content says."""
        try:
            return read_keys(content)
        except KeysTextError as error:
            raise KeysFileError(f"{self.path}: {error}") from None

    def parsed_after(self, known: KeysText, content: bytes) -> KeysText:
        """Returns what a content says that begins with one that is known: only the rest of it is read where that will do."""
        return read_appended(known, content[known.whole_bytes :]) or self.parsed(content)

    def read(self) -> KeySnapshot:
        """Returns the keys and tenants."""
        return self.parsed(self.content()).snapshot

    def add(self, record: KeyRecord) -> None:
        """Appends a key, and creates the file if it is missing. On return it is on the disk.

        Raises KeyExistsError, or ValueError for what could not be read again.
        """
        check_new(record)
        with self._alone(create=True) as descriptor:
            known = self._whole(descriptor)
            if record.key_id in known.snapshot.keys:
                raise KeyExistsError(record.key_id)
            if len(known.snapshot.keys) >= MAX_KEYS:
                raise KeysFileError(f"{self.path}: has {MAX_KEYS} keys, which is the most: remove old ones")
            self._append(descriptor, known, key_text(record))

    def revoke(self, key_id: str, at: float) -> bool:
        """Appends that a key is revoked. Returns False if it was already. Raises NoSuchKeyError."""
        with self._alone(create=False) as descriptor:
            known = self._whole(descriptor)
            if key_id in known.snapshot.revoked:
                return False
            if key_id not in known.snapshot.keys:
                raise NoSuchKeyError(key_id)
            self._append(descriptor, known, revoked_text(key_id, at))
        return True

    def _whole(self, descriptor: int) -> KeysText:
        os.lseek(descriptor, 0, os.SEEK_SET)
        return self.parsed(_all(descriptor))

    def _append(self, descriptor: int, known: KeysText, table: str) -> None:
        """Writes a table in place of what another command wrote in part; nothing of it if there is no room."""
        end = known.whole_bytes
        joint = "" if end == 0 or os.pread(descriptor, 1, end - 1) == b"\n" else "\n"
        added = (joint + table).encode()
        if end + len(added) > MAX_FILE_BYTES:
            raise KeysFileError(f"{self.path}: would have more than {MAX_FILE_BYTES} bytes: remove old keys")
        os.ftruncate(descriptor, end)
        try:
            written = 0
            while written < len(added):
                written += os.pwrite(descriptor, added[written:], end + written)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise

    @contextmanager
    def _alone(self, *, create: bool) -> Iterator[int]:
        """Waits until no other command changes the file. The kernel releases the lock of one that dies."""
        with self._failures():
            if create:
                private_folder(self.path.parent)
            while True:
                created = create and not os.path.exists(self.path)
                descriptor = opener(str(self.path), os.O_RDWR | (os.O_CREAT if create else 0))
                try:
                    self._check(descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    if not self._is_current(descriptor):  # an editor replaced the file meanwhile
                        continue
                    yield descriptor
                    if created:
                        _sync_folder(self.path.parent)
                    return
                finally:
                    os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _check(self, descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise KeysFileError(f"{self.path}: is no file")
        if mode & _FORBIDDEN:
            raise KeysFileError(
                f"{self.path}: has mode {stat.S_IMODE(mode):04o}, so others may read or change it; "
                f"0600, 0400, 0640 and 0440 are accepted: chmod 600 {self.path}"
            )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise KeysFileError(f"{self.path}: {error.strerror or error}") from error


def _all(descriptor: int) -> bytes:
    pieces, size = [], 0
    while size <= MAX_FILE_BYTES and (piece := os.read(descriptor, _PIECE)):
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
