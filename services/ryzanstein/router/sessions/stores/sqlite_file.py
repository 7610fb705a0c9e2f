"""The file of the SQLite store: its schema and versions, how it is opened, and its errors.

A file that cannot be read as what it should be is refused at the start and left unchanged.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ryzanstein import errors
from ryzanstein.files.private_files import private_file
from ryzanstein.router.sessions.store import OBJECT_MARK, RESPONSE_GLOB, store_unavailable
from ryzanstein.router.storage import sqlite_room as disk
from ryzanstein.router.storage import sqlite_wal as write_ahead
from ryzanstein.router.storage.bounds import UNBOUNDED
from ryzanstein.router.storage.sqlite_damage import check, is_damage

SCHEMA_VERSION = 4
# Several routers on one host take turns within a millisecond. A lock that is held for longer than
# this is held for long.
BUSY_TIMEOUT_S = 0.15
_OPEN_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 1.0

# The two kinds of sessions are listed and evicted apart, each by an index of its own.
CONVERSATIONS = f"session_id NOT GLOB '{RESPONSE_GLOB}'"
RESPONSES = f"session_id GLOB '{RESPONSE_GLOB}'"
_OBJECTS = f"session_id GLOB '{RESPONSE_GLOB}{OBJECT_MARK}'"
_NEW_RESPONSE = f"NEW.session_id GLOB '{RESPONSE_GLOB}' AND NEW.session_id NOT GLOB '*{OBJECT_MARK}'"

# `messages` has row ids: without them, as in files of earlier versions, a text above 1 kB takes pages of its own.
_STEPS = (
    """
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, model TEXT NOT NULL,
    create_time REAL NOT NULL, update_time REAL NOT NULL, node_id TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX sessions_by_use ON sessions (update_time, session_id);
CREATE TABLE messages (
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, position INTEGER NOT NULL,
    role TEXT NOT NULL, content TEXT NOT NULL, PRIMARY KEY (session_id, position)
);
""",
    """
CREATE TABLE turns (
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, generation_id TEXT NOT NULL,
    PRIMARY KEY (session_id, generation_id)
) WITHOUT ROWID;
CREATE TABLE claims (
    session_id TEXT PRIMARY KEY, generation_id TEXT NOT NULL, owner TEXT NOT NULL, taken_at REAL NOT NULL, ttl_s REAL NOT NULL
) WITHOUT ROWID;
""",
    f"""
CREATE TABLE tenants (
    session_id TEXT PRIMARY KEY REFERENCES sessions ON DELETE CASCADE, tenant TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX conversations_by_use ON sessions (update_time, session_id) WHERE {CONVERSATIONS};
CREATE INDEX responses_by_use ON sessions (update_time, session_id) WHERE {RESPONSES};
""",
    # The trigger also adds what a router of an earlier version keeps beside this one. What that
    # evicted of a response is half of it: its object goes, too.
    f"""
CREATE TABLE responses (
    session_id TEXT PRIMARY KEY REFERENCES sessions ON DELETE CASCADE, used REAL NOT NULL,
    num_children INTEGER NOT NULL DEFAULT 0, deleted INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX leaves_by_use ON responses (used, session_id) WHERE num_children = 0;
INSERT INTO responses (session_id, used)
    SELECT session_id, update_time FROM sessions WHERE {RESPONSES} AND NOT {_OBJECTS};
DELETE FROM sessions WHERE {_OBJECTS}
    AND substr(session_id, 1, length(session_id) - {len(OBJECT_MARK)}) NOT IN (SELECT session_id FROM responses);
CREATE TRIGGER response_kept AFTER INSERT ON sessions WHEN {_NEW_RESPONSE}
    BEGIN INSERT INTO responses (session_id, used) VALUES (NEW.session_id, NEW.update_time); END;
""",
)

_ADDED = {
    "tenants_by_name": "CREATE INDEX IF NOT EXISTS tenants_by_name ON tenants (tenant, session_id)",
    "owned_bytes": """CREATE TABLE IF NOT EXISTS owned_bytes (
    session_id TEXT PRIMARY KEY REFERENCES sessions ON DELETE CASCADE, owner TEXT NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID""",
}


def connect(path: Path, max_bytes: int = UNBOUNDED) -> sqlite3.Connection:
    """Returns an open file of this schema, which does not grow above `max_bytes`.

    Raises FAILED_PRECONDITION STATE_TOO_NEW or STATE_CORRUPT, naming the file; sqlite3.Error and
    OSError when it cannot be used for another reason.
    """
    private_file(path)
    db = sqlite3.connect(path, timeout=_OPEN_TIMEOUT_S, isolation_level=None)
    # A damaged name must not keep the other sessions from being listed. Messages are read as bytes.
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        with _readable(path):
            # Before anything that writes.
            check(db, _CHECK_TIMEOUT_S)
            disk.let_shrink(db)
            db.execute("PRAGMA foreign_keys = ON")
            disk.let_shrink(db)
            # Where the schema is not what its version says, this fails and leaves the file as it is.
            _migrate(db, path)
            _index_owners(db)
            write_ahead.turn_on(db, _OPEN_TIMEOUT_S)
            db.execute("PRAGMA synchronous = NORMAL")
            disk.convert(db)
            disk.bound(db, max_bytes)
        db.execute(f"PRAGMA busy_timeout = {round(BUSY_TIMEOUT_S * 1000)}")
    except BaseException:
        db.close()
        raise
    return db


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Runs the block in a transaction.

    IMMEDIATE takes the write lock before anything is read, so that what was read still holds when
    it is written. DEFERRED is for reads only, which see one moment.
    """
    db.execute(f"BEGIN {kind}")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def as_unavailable() -> Iterator[None]:
    """Raises SQLite's failures (locked, full, disk gone, damaged) as `StoreUnavailableError`."""
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise
    except sqlite3.Error as error:
        raise store_unavailable(f"the session database failed: {error}") from error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not is_damage(error):
            raise
        raise _corrupt(path, str(error)) from error


def _corrupt(path: Path, what: str) -> errors.RyzansteinError:
    return errors.failed_precondition(
        "STATE_CORRUPT", f"{path}: {what}; the file was not changed: restore it, or move it away to start without sessions"
    )


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    """Updates the schema.

    Takes the write lock only if there is something to do, so that a router can start while another
    process holds the lock.
    """
    if _version(db, path) == SCHEMA_VERSION:
        return
    with transaction(db):
        for step in _STEPS[_version(db, path) :]:
            for statement in filter(str.strip, step.split(";\n")):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _index_owners(db: sqlite3.Connection) -> None:
    """Adds what versions of the same schema did not have. They use the file as before.

    They keep the index up to date. The bytes lack what they write, so that these seem less.
    """
    for name, statement in _ADDED.items():
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone():
            db.execute(statement)


def _version(db: sqlite3.Connection, path: Path) -> int:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        what = f"the session database {path} has schema version {version}, the newest supported is {SCHEMA_VERSION}"
        raise errors.failed_precondition("STATE_TOO_NEW", what)
    return int(version)
