"""SQLite's write-ahead log, for a file that several processes open at the same moment."""

from __future__ import annotations

import random
import sqlite3
import time

_PAUSE_S = (0.001, 0.01)


def turn_on(db: sqlite3.Connection, timeout_s: float) -> None:
    """Turns on the write-ahead log, and retries for up to `timeout_s` while others do the same.

    Two processes that turn it on at once each hold what the other needs. SQLite then refuses
    without waiting, whatever its busy timeout is. Raises sqlite3.OperationalError when the cause is
    another one, or when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(*_PAUSE_S))
