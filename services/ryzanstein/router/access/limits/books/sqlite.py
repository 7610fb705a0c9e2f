"""The counts of months in one SQLite file, which the routers of a host share.

All statements run in the book's own thread. A file that cannot be opened, is full or damaged is tried again
with every call; what was used waits in the router's memory then.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ryzanstein.files.private_files import private_file
from ryzanstein.router.access.limits.usage import (
    KEEP_YEARS,
    MAX_TENANTS,
    NOTHING,
    OTHER_TENANTS,
    UsageCount,
    UsageReport,
    UsageRow,
    this_month,
)
from ryzanstein.router.storage import sqlite_room as disk
from ryzanstein.router.storage import sqlite_wal as write_ahead
from ryzanstein.router.storage.bounds import USAGE_BYTES

ATTENDED_S = 30.0
_MOST_KEPT = 100_000
_BUSY_S = 1.0
_Result = TypeVar("_Result")

_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS usage (
    month TEXT NOT NULL, tenant TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt INTEGER NOT NULL, generated INTEGER NOT NULL, PRIMARY KEY (month, tenant)
) WITHOUT ROWID
""",
    # What is counted of each generation, in the order of the last report.
    """
CREATE TABLE IF NOT EXISTS counted (
    number INTEGER PRIMARY KEY AUTOINCREMENT, generation_id TEXT NOT NULL UNIQUE,
    requests INTEGER NOT NULL, prompt INTEGER NOT NULL, generated INTEGER NOT NULL, until REAL NOT NULL
)
""",
    "CREATE TABLE IF NOT EXISTS routers (router_id TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID",
)
_COUNT = "INSERT OR REPLACE INTO counted (generation_id, requests, prompt, generated, until) VALUES (?, ?, ?, ?, ?)"
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (month, tenant) DO UPDATE
    SET requests = requests + excluded.requests, prompt = prompt + excluded.prompt, generated = generated + excluded.generated
"""


class SqliteUsage:
    """A `UsageBook` in a file. A generation is known for `keep_s` after its last report."""

    def __init__(self, path: Path, router_id: str, keep_s: float) -> None:
        self._path, self._router_id, self._keep_s = path, router_id, keep_s
        self._thread = ThreadPoolExecutor(1, "usage")
        self._db: sqlite3.Connection | None = None

    async def write(self, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        return await self._run(lambda db: self._write(db, reports))

    async def total(self, tenant: str) -> tuple[str, int]:
        return await self._run(lambda db: (month := this_month(), _total(db, month, tenant)))

    async def rows(self, month: str, tenant: str | None) -> list[UsageRow]:
        return await self._run(lambda db: _rows(db, month, tenant))

    async def attend(self) -> int:
        return await self._run(self._attend)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)

    def _done(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        try:
            if self._db is None:
                self._db = _connected(self._path)
            with _transaction(self._db):
                return work(self._db)
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise ConnectionError(f"{self._path}: {error}") from error

    def _close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def _write(self, db: sqlite3.Connection, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        month, until = this_month(), time.time() + self._keep_s
        more: dict[str, UsageCount] = {}
        for report in reports:
            found = db.execute(
                "SELECT requests, prompt, generated FROM counted WHERE generation_id = ?", (report.generation_id,)
            ).fetchone()
            before = report.known if found is None else UsageCount(*found)
            new = report.count.beyond(before)
            total = before.plus(new)
            if total != NOTHING:
                # Not updated in place: the number says which was reported last.
                db.execute(
                    _COUNT,
                    (report.generation_id, *total, until),
                )
            more[report.tenant] = more.get(report.tenant, NOTHING).plus(new)
        for tenant, new in more.items():
            if new != NOTHING:
                db.execute(_ADD, (month, _name(db, month, tenant), *new))
        _forget(db, month)
        return {tenant: (month, _total(db, month, tenant)) for tenant in more}

    def _attend(self, db: sqlite3.Connection) -> int:
        now = time.time()
        db.execute("DELETE FROM routers WHERE until < ? OR router_id = ?", (now, self._router_id))
        db.execute("INSERT INTO routers VALUES (?, ?)", (self._router_id, now + ATTENDED_S))
        (count,) = db.execute("SELECT count(*) FROM routers").fetchone()
        return int(count)


def _name(db: sqlite3.Connection, month: str, tenant: str) -> str:
    """Returns the name that a tenant is counted under."""
    if db.execute("SELECT 1 FROM usage WHERE month = ? AND tenant = ?", (month, tenant)).fetchone():
        return tenant
    (count,) = db.execute("SELECT count(*) FROM usage WHERE month = ?", (month,)).fetchone()
    return tenant if count < MAX_TENANTS else OTHER_TENANTS


def _forget(db: sqlite3.Connection, month: str) -> None:
    """Forgets generations that nobody reports any more, and old months."""
    newest = "(SELECT max(number) FROM counted)"
    db.execute(
        f"DELETE FROM counted WHERE number IN (SELECT number FROM counted ORDER BY number LIMIT 1000) "
        f"AND (until < ? OR number <= {newest} - ?)",
        (time.time(), _MOST_KEPT),
    )
    year, number = map(int, month.split("-"))
    oldest = f"{year - KEEP_YEARS:04}-{number:02}"
    db.execute("DELETE FROM usage WHERE month < ?", (oldest,))


def _total(db: sqlite3.Connection, month: str, tenant: str) -> int:
    found = db.execute("SELECT prompt + generated FROM usage WHERE month = ? AND tenant = ?", (month, tenant)).fetchone()
    return 0 if found is None else int(found[0])


def _rows(db: sqlite3.Connection, month: str, tenant: str | None) -> list[UsageRow]:
    rows = db.execute(
        "SELECT tenant, requests, prompt, generated FROM usage "
        "WHERE month = ?1 AND (?2 IS NULL OR tenant = ?2) ORDER BY tenant",
        (month, tenant),
    )
    return [UsageRow(name, month, UsageCount(*counts)) for name, *counts in rows]


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _connected(path: Path) -> sqlite3.Connection:
    private_file(path)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    try:
        disk.let_shrink(db)
        write_ahead.turn_on(db, _BUSY_S)
        disk.bound(db, USAGE_BYTES)
        # A crash of the process loses nothing, a power cut at most the last counts.
        db.execute("PRAGMA synchronous = NORMAL")
        with _transaction(db):
            for statement in _SCHEMA:
                db.execute(statement)
    except BaseException:
        db.close()
        raise
    return db
