"""Which sessions of one SQLite file somebody has changed, in memory that all routers of the file share.

A file that cannot be read tells nobody that another router has added a turn. This table does: whoever changes a session puts a
new mark into the session's place before and after, and what was read under another mark is not trusted any more. It stays
readable when the disk is not. Sessions share places, so that a mark may be taken for another session's change: what is
remembered is then read again, or refused, without need.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

_PLACES = 65_536
_MARK_BYTES = 8


class SqliteChanges:
    """The table beside the session database. OSError where it cannot be made."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Room on the disk now: a page that finds none later would end the process.
            os.posix_fallocate(descriptor, 0, _PLACES * _MARK_BYTES)
            self._map = mmap.mmap(descriptor, _PLACES * _MARK_BYTES)
        finally:
            os.close(descriptor)
        self._marks = memoryview(self._map).cast("Q")
        self._ours: dict[int, int] = {}

    def mark(self, session_id: str) -> int:
        """Who changes the session next leaves another one."""
        return self._marks[_place(session_id)]

    def is_ours(self, session_id: str) -> bool:
        """This router made the last change in the session's place."""
        place = _place(session_id)
        return self._ours.get(place) == self._marks[place]

    @contextlib.contextmanager
    def changing(self, session_id: str) -> Iterator[None]:
        """Around a change. One that another router makes meanwhile keeps its mark."""
        place = _place(session_id)
        self._ours[place] = self._marks[place] = begun = _fresh()
        try:
            yield
        finally:
            if self._marks[place] == begun:
                self._ours[place] = self._marks[place] = _fresh()

    def close(self) -> None:
        self._marks.release()
        self._map.close()


def _place(session_id: str) -> int:
    return zlib.crc32(session_id.encode()) % _PLACES


def _fresh() -> int:
    return secrets.randbits(64)
