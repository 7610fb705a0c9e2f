"""Finds out whether a SQLite file is damaged."""

from __future__ import annotations

import sqlite3
import time

_INSTRUCTIONS_BETWEEN_LOOKS = 10_000


def check(db: sqlite3.Connection, timeout_s: float) -> None:
    """Looks for damage, for a bounded time: a large file is not read to its end.

    Raises sqlite3.DatabaseError or UnicodeDecodeError for a damaged file.
    """
    until = time.monotonic() + timeout_s
    db.set_progress_handler(lambda: time.monotonic() > until, _INSTRUCTIONS_BETWEEN_LOOKS)
    try:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return
    finally:
        db.set_progress_handler(None, 0)
    if found != "ok":
        raise sqlite3.DatabaseError(found.splitlines()[-1])


def is_damage(error: Exception) -> bool:
    """Returns whether an error means that the file is damaged, not that it is locked, full or away.

    With a damaged schema a statement is wrong that is right otherwise, and SQLite's message itself
    may be no text.
    """
    if isinstance(error, UnicodeDecodeError):
        return True
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF == sqlite3.SQLITE_ERROR
    return isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.ProgrammingError)
