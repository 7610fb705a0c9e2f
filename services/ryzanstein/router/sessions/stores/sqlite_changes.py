"""A table of session changes in memory shared by all routers of one SQLite file.

A file that cannot be read does not show that another router has added a turn. This table does:
before and after a change, a router writes a new mark into the session's place, and what was read
under another mark is no longer trusted. The table stays readable when the disk is not. Sessions
share places, so a mark may come from a change of another session: what is remembered is then read
again, or refused, without need.
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
    """The table next to the session database. Raises OSError where it cannot be created."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Allocate the disk space now: a page without disk space would kill the process later.
            os.posix_fallocate(descriptor, 0, _PLACES * _MARK_BYTES)
            self._map = mmap.mmap(descriptor, _PLACES * _MARK_BYTES)
        finally:
            os.close(descriptor)
        self._marks = memoryview(self._map).cast("Q")
        self._ours: dict[int, int] = {}

    def mark(self, session_id: str) -> int:
        """Returns the session's mark. The next change replaces it."""
        return self._marks[_place(session_id)]

    def is_ours(self, session_id: str) -> bool:
        """Returns whether this router made the last change in the session's place."""
        place = _place(session_id)
        return self._ours.get(place) == self._marks[place]

    @contextlib.contextmanager
    def changing(self, session_id: str) -> Iterator[None]:
        """Marks a session before and after a change.

        A change by another router in between keeps its mark.
        """
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
