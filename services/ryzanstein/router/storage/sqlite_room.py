"""How much disk a SQLite file with a write-ahead log takes: a bound that it never exceeds, and how it shrinks.

Deleted rows leave free pages, which later rows use. A file that was created with `let_shrink` also
gives them back, some pages at a time.
"""

from __future__ import annotations

import contextlib
import sqlite3

_KEPT_LOG_BYTES = 16 * 2**20
_INCREMENTAL = 2
_STEP_PAGES = 256
RESERVE_BYTES = 4 * 2**20
"""Free space that a file keeps for the next rows."""
_CONVERTED_BYTES = 64 * 2**20


def let_shrink(db: sqlite3.Connection) -> None:
    """Has a new file keep what it needs to shrink. Call it before anything is written.

    An existing file stays as it is: the statement would write into it, and wait for who else writes.
    """
    if _number(db, "page_count") == 0:
        db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")


def convert(db: sqlite3.Connection) -> None:
    """Rewrites a file of an earlier version so that it can shrink, if that takes about a second at most.

    A larger one, or one that another process is writing or that has no disk space for a copy, stays as it is.
    """
    if _number(db, "auto_vacuum") == _INCREMENTAL or _number(db, "page_count") * _number(db, "page_size") > _CONVERTED_BYTES:
        return
    with contextlib.suppress(sqlite3.OperationalError):
        db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        db.execute("VACUUM")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def bound(db: sqlite3.Connection, max_bytes: int) -> None:
    """Refuses to let the file grow further, with SQLITE_FULL, and lets its log keep no more than it needs.

    A file that is larger now may keep its size.
    """
    db.execute(f"PRAGMA max_page_count = {min(max_bytes // _number(db, 'page_size'), 2**32 - 2)}")
    db.execute(f"PRAGMA journal_size_limit = {_KEPT_LOG_BYTES}")


def capacity(db: sqlite3.Connection) -> int:
    """Returns how large the file may become."""
    return _number(db, "max_page_count") * _number(db, "page_size")


def used_bytes(db: sqlite3.Connection) -> int:
    """Returns what the file needs, without its free pages; within a transaction, as that leaves it."""
    return (_number(db, "page_count") - _number(db, "freelist_count")) * _number(db, "page_size")


def can_shrink(db: sqlite3.Connection, reserve_bytes: int = RESERVE_BYTES) -> bool:
    """Returns whether more is free than the next rows need."""
    return _surplus(db, reserve_bytes) > 0 and _number(db, "auto_vacuum") == _INCREMENTAL


def shrink(db: sqlite3.Connection, reserve_bytes: int = RESERVE_BYTES) -> None:
    """Gives back some free pages, which takes about a millisecond. The last step copies the log, which cuts the file."""
    surplus = _surplus(db, reserve_bytes)
    # A script: `execute` runs this statement for its first page only.
    db.executescript(f"PRAGMA incremental_vacuum({min(surplus, _STEP_PAGES)})")
    if surplus <= _STEP_PAGES:
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _surplus(db: sqlite3.Connection, reserve_bytes: int) -> int:
    return _number(db, "freelist_count") - reserve_bytes // _number(db, "page_size")


def _number(db: sqlite3.Connection, pragma: str) -> int:
    (number,) = db.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)
