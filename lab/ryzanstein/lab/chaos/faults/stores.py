"""Where sessions and journals are stored: locked, full, gone."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

from ryzanstein.lab.chaos.fault import Fault, Resume, Scope, Sign, Victim
from ryzanstein.lab.chaos.stage.layouts import ROUTERS
from ryzanstein.lab.chaos.stage.stage import LaboratoryError, Stage

_OUTAGE_S = 2.0
_LOCK_S = 5.0


@asynccontextmanager
async def _sqlite_locked(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    """Locks every database of the routers from another process, this one."""
    with ExitStack() as stack:
        for path in _databases(stage.plan.sessions):
            connection = stack.enter_context(closing(sqlite3.connect(path, timeout=_LOCK_S, isolation_level=None)))
            connection.execute("BEGIN EXCLUSIVE")
            stack.callback(connection.execute, "ROLLBACK")
        yield frozenset()


@asynccontextmanager
async def _disk_full(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    disk = stage.plan.disk
    if disk is None:
        raise LaboratoryError("this fault needs permission to mount")
    for path in _databases(stage.plan.sessions):
        # A write-ahead log that has grown takes many more writes without another page of the disk.
        with closing(sqlite3.connect(path, timeout=_LOCK_S, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    disk.fill()
    try:
        yield frozenset()
    finally:
        disk.empty()


@asynccontextmanager
async def _redis_killed(stage: Stage, victim: Victim) -> AsyncIterator[frozenset[str]]:
    redis = stage.plan.redis
    assert redis is not None, "the layout has a Redis"
    redis.kill()
    try:
        yield frozenset()
    finally:
        redis.start()


def _databases(directory: Path) -> list[Path]:
    found = list(directory.glob("*.db"))
    if not found:
        raise LaboratoryError(f"no database of a router in {directory}")
    return found


_OUTAGE = (
    Sign("router", "session store fails, sessions are kept in memory"),
    Sign("router", "journal unavailable, generations continue in memory"),
)
FAULTS = (
    Fault(
        "store_sqlite_locked",
        f"another process locks the session database for {_OUTAGE_S:g} s",
        _sqlite_locked,
        _OUTAGE,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        lasts_s=_OUTAGE_S,
        at_most_s=_OUTAGE_S,
    ),
    Fault(
        "store_disk_full",
        f"the disk of the session database is full for {_OUTAGE_S:g} s",
        _disk_full,
        _OUTAGE,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        lasts_s=_OUTAGE_S,
        at_most_s=_OUTAGE_S,
        needs_network=True,
    ),
    Fault(
        "store_redis_killed",
        f"SIGKILL of Redis, restarted after {_OUTAGE_S:g} s",
        _redis_killed,
        _OUTAGE,
        ROUTERS,
        scope=Scope.ALL,
        resumes=Resume.ANY,
        lasts_s=_OUTAGE_S,
        at_most_s=_OUTAGE_S,
    ),
)
