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
# Of 10,000 sessions in use, 1 in 50,000 shares its place with as many others.
_OURS_PER_PLACE = 4


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
        # By place: this router's last mark, and the sessions that it changed up to then.
        self._ours: dict[int, tuple[int, tuple[str, ...]]] = {}

    def mark(self, session_id: str) -> int:
        """Returns the session's mark. The next change replaces it."""
        return self._marks[_place(session_id)]

    def is_ours(self, session_id: str) -> bool:
        """Returns whether this router changed the session, and no other router changed it since.

        False also, without need, when another router changed another session in the same place
        since, or this router four others.
        """
        return session_id in self._ours_at(_place(session_id))

    @contextlib.contextmanager
    def changing(self, session_id: str) -> Iterator[None]:
        """Marks a session before and after a change.

        When another router marks the place in between, nothing in it is this router's afterwards.
        Nor is it the other router's, whose change may have come first.
        """
        place = _place(session_id)
        others = [other for other in self._ours_at(place) if other != session_id]
        ours = (*others[1 - _OURS_PER_PLACE :], session_id)
        begun = self._take(place, ours)
        try:
            yield
        finally:
            if self._marks[place] == begun:
                self._take(place, ours)
            else:
                self._marks[place] = _fresh()

    def _ours_at(self, place: int) -> tuple[str, ...]:
        """Returns the sessions that this router changed since another one marked the place."""
        mark, session_ids = self._ours.get(place, (0, ()))
        return session_ids if mark == self._marks[place] else ()

    def _take(self, place: int, session_ids: tuple[str, ...]) -> int:
        """Writes a new mark, under which these sessions are this router's. Returns the mark."""
        mark = _fresh()
        self._ours[place] = mark, session_ids
        self._marks[place] = mark
        return mark

    def close(self) -> None:
        self._marks.release()
        self._map.close()


def _place(session_id: str) -> int:
    return zlib.crc32(session_id.encode()) % _PLACES


def _fresh() -> int:
    return secrets.randbits(64)
