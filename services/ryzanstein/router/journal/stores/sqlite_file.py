"""The file of the SQLite journal: its schema, how it is opened, and how it is begun anew.

A damaged file is set aside, under the same name with `.damaged`, and an empty one takes its place.
A large one is removed instead.
The routers that share it see that another file has its name, or none, and open that one. Files are
opened and set aside under a lock of their own: the write-ahead log beside a file belongs to
whatever file has the name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import structlog

from ryzanstein.files.private_files import opener, private_file, private_folder
from ryzanstein.router.storage import sqlite_room as disk
from ryzanstein.router.storage import sqlite_wal as write_ahead
from ryzanstein.router.storage.bounds import MOST_DAMAGED_BYTES, UNBOUNDED
from ryzanstein.router.storage.sqlite_damage import check, is_damage

log = structlog.get_logger(__name__)

SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE generations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, generation_id TEXT NOT NULL UNIQUE,
    owner_id TEXT NOT NULL, address TEXT NOT NULL, epoch INTEGER NOT NULL, expires REAL NOT NULL
);
CREATE TABLE requests (number INTEGER PRIMARY KEY, request BLOB NOT NULL);
CREATE TABLE batches (number INTEGER NOT NULL, batch BLOB NOT NULL);
CREATE INDEX batches_by_number ON batches (number);
CREATE TABLE leases (owner_id TEXT PRIMARY KEY, address TEXT NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE boot (boot_id TEXT NOT NULL);
"""
# Not part of the schema: an earlier version of the router that shares the file ignores these tables.
_ADDED = (
    """
CREATE TABLE IF NOT EXISTS keys (
    key TEXT PRIMARY KEY, generation_id TEXT NOT NULL, body BLOB NOT NULL, held REAL NOT NULL, expires REAL NOT NULL
) WITHOUT ROWID
""",
    # Generations that have expired, with their epochs.
    """
CREATE TABLE IF NOT EXISTS expired (
    generation_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, until REAL NOT NULL
) WITHOUT ROWID
""",
    # Where clients reach the routers that have leases.
    "CREATE TABLE IF NOT EXISTS public_addresses (owner_id TEXT PRIMARY KEY, address TEXT NOT NULL) WITHOUT ROWID",
    # When a router last said that clients can come to it.
    "CREATE TABLE IF NOT EXISTS attended (one INTEGER PRIMARY KEY CHECK (one = 1), at REAL NOT NULL)",
)
# Added to the table of an earlier version, whose routers do not set it.
_WRITTEN = "ALTER TABLE generations ADD COLUMN written REAL"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BUSY_S = 1.0
_OPEN_S = 5.0
_CHECK_S = 1.0
_LOOK_S = 0.01
_SUFFIXES = ("-wal", "-shm", "")
# On a disk that damages whatever is written, a new file would not help.
_LEAST_PAUSE_S = 10.0


class JournalFile:
    """A connection to the file at a path. Used in one thread."""

    def __init__(self, path: Path, max_bytes: int = UNBOUNDED) -> None:
        """Opens the file, which does not grow above `max_bytes`. Raises OSError or sqlite3.Error when it cannot be used."""
        self._path = path
        self._max_bytes = max_bytes
        self._identity: tuple[int, int] | None = None
        self._set_aside_at = float("-inf")
        self.anew_at = float("-inf")
        """When another file took the place of one that other routers may still use, in seconds of `time.monotonic`."""
        private_folder(path.parent)
        with _alone(path):
            self._open()

    def follow(self) -> bool:
        """Opens the file that has the name now, if it is another one. Returns whether it is."""
        if self._is_the_same():
            return False
        log.warning("another journal is in place of this one, opening it", path=str(self._path))
        with _alone(self._path):
            self.close()
            self._open()
        self.anew_at = time.monotonic()
        return True

    def begin_anew(self, error: Exception) -> bool:
        """Sets a damaged file aside and opens a new one. Returns whether this router did or another one."""
        if time.monotonic() - self._set_aside_at < _LEAST_PAUSE_S:
            return False
        with _alone(self._path):
            is_here = self._is_the_same()
            self.close()
            if is_here:
                self._set_aside(error)
            self._open()
        self.anew_at = time.monotonic()
        return True

    def close(self) -> None:
        """Closes the connection. Before a file takes its name: SQLite removes the log beside it by name."""
        self._identity = None
        self.connection.close()

    def _open(self) -> None:
        try:
            self.connection = _connected(self._path, self._max_bytes)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            self._set_aside(error)
            self.connection = _connected(self._path, self._max_bytes)
        self._identity = _identity(self._path)

    def _is_the_same(self) -> bool:
        try:
            return _identity(self._path) == self._identity
        except FileNotFoundError:
            return False

    def _set_aside(self, error: Exception) -> None:
        self._set_aside_at = self.anew_at = time.monotonic()
        aside = self._path.with_name(self._path.name + ".damaged")
        kept = sum(_size(self._path.with_name(self._path.name + suffix)) for suffix in _SUFFIXES) <= MOST_DAMAGED_BYTES
        kept_as = str(aside) if kept else ""
        log.warning("journal corrupt, starting with an empty one", path=str(self._path), kept_as=kept_as, error=str(error))
        for suffix in _SUFFIXES:
            damaged, place = self._path.with_name(self._path.name + suffix), aside.with_name(aside.name + suffix)
            place.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                damaged.rename(place) if kept else damaged.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other routers from opening the file or setting it aside. Raises sqlite3.OperationalError after a while."""
    lock = opener(str(path.with_name(path.name + "-lock")), os.O_RDWR | os.O_CREAT)
    try:
        until = time.monotonic() + _OPEN_S
        while not _locked(lock):
            if time.monotonic() > until:
                raise sqlite3.OperationalError("another process keeps the journal from being opened")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _connected(path: Path, max_bytes: int) -> sqlite3.Connection:
    private_file(path)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    # A damaged name is the name of nobody.
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        check(db, _CHECK_S)
        disk.let_shrink(db)
        write_ahead.turn_on(db, _OPEN_S)
        disk.bound(db, max_bytes)
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN IMMEDIATE")
        _prepare(db)
        for statement in _ADDED:
            db.execute(statement)
        if "written" not in {name for _, name, *_ in db.execute("PRAGMA table_info(generations)")}:
            db.execute(_WRITTEN)
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection) -> None:
    """Replaces all tables by empty ones, unless they are of this version and this boot."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == SCHEMA_VERSION and db.execute("SELECT boot_id FROM boot").fetchone() == (boot_id,):
        return
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall():
        db.execute(f'DROP TABLE "{name}"')
    for statement in _SCHEMA.split(";\n"):
        db.execute(statement)
    db.execute("INSERT INTO boot VALUES (?)", (boot_id,))
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
