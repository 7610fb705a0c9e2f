"""What survives a restart, in SQLite: deployments, drain requests, refusals, halts, ids of the last members, operators' acts.

All access runs in a thread of its own, so that a slow disk never delays a heartbeat. The file is
locked while it is open: two orchestrators on one store would each undo what the other wrote.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

import structlog

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.auth.audit.audit_record import AuditRecord
from ryzanstein.cluster import Deployment
from ryzanstein.files.private_files import private_file
from ryzanstein.orchestrator.state.audit_table import AUDIT_SCHEMA, AuditPage, AuditQuery, read_records, write_record
from ryzanstein.orchestrator.state.stored import (
    StoredHalt,
    StoredMembership,
    StoredRefusal,
    StoreError,
    deployment_facts,
    deployment_of,
)
from ryzanstein.orchestrator.telemetry import OrchestratorTelemetry

log = structlog.get_logger(__name__)

SCHEMA_VERSION = 3
_SCHEMA = f"""
BEGIN EXCLUSIVE;
CREATE TABLE IF NOT EXISTS deployments (
    model TEXT PRIMARY KEY, path TEXT NOT NULL, replicas INTEGER NOT NULL,
    revision INTEGER NOT NULL, idle_unload_s REAL NOT NULL, bounds TEXT NOT NULL DEFAULT '{{}}'
) STRICT;
CREATE TABLE IF NOT EXISTS drains (node_id TEXT PRIMARY KEY, incarnation TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY, model TEXT NOT NULL, path TEXT NOT NULL, pinned INTEGER NOT NULL, revision INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS members (node_id TEXT PRIMARY KEY) STRICT;
CREATE TABLE IF NOT EXISTS leading (only INTEGER PRIMARY KEY CHECK (only = 1), epoch INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS refusals (
    node_id TEXT NOT NULL, model TEXT NOT NULL, incarnation TEXT NOT NULL, revision INTEGER NOT NULL, left_s REAL NOT NULL,
    reason TEXT NOT NULL, PRIMARY KEY (node_id, model)
) STRICT;
CREATE TABLE IF NOT EXISTS halts (
    model TEXT PRIMARY KEY, revision INTEGER NOT NULL, reason TEXT NOT NULL, lasting INTEGER NOT NULL
) STRICT;
{AUDIT_SCHEMA}
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
# Version 1 had neither revisions nor idle unloading, version 2 no audit. Earlier versions 3 had no adapters, epochs,
# refusals or halts; programs of then leave those tables as they are, so that an upgrade can be taken back. They also had no
# bounds of deployments, and forget those of a deployment that they replace.
_FROM_VERSION_1 = """
BEGIN EXCLUSIVE;
ALTER TABLE deployments ADD COLUMN revision INTEGER NOT NULL DEFAULT 1;
ALTER TABLE deployments ADD COLUMN idle_unload_s REAL NOT NULL DEFAULT 0;
PRAGMA user_version = 2;
COMMIT;
"""

_WITH_BOUNDS = "ALTER TABLE deployments ADD COLUMN bounds TEXT NOT NULL DEFAULT '{}'"
_DEPLOYMENT = "model, path, replicas, revision, idle_unload_s, bounds"

_T = TypeVar("_T")


class Store:
    """A `StateStore` in a SQLite file. Open it with `Store.open`.

    Methods raise UNAVAILABLE (STORE_UNAVAILABLE) when the disk fails; nothing is written by half.
    """

    def __init__(self, path: Path, telemetry: OrchestratorTelemetry) -> None:
        self._path = path
        self._telemetry = telemetry
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orchestrator-store")
        self._connection: sqlite3.Connection
        self._written = StoredMembership()
        self.fenced: Callable[[int], None] = lambda epoch: None

    @classmethod
    async def open(cls, path: Path, telemetry: OrchestratorTelemetry) -> Store:
        """Opens the file, or creates it when there is none.

        Raises StoreError when it is unreadable, locked by another process, or of a newer version.
        """
        store = cls(path, telemetry)
        try:
            await asyncio.get_running_loop().run_in_executor(store._thread, store._connect)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            store._thread.shutdown()
            remedy = _remedy(error)
            raise StoreError(f"cannot open the store {path}: {error}{remedy and f'; {remedy}'}") from error
        except StoreError:
            store._thread.shutdown()
            raise
        return store

    async def deployments(self) -> tuple[Deployment, ...]:
        return await self._run("read", self._read_deployments)

    async def membership(self) -> StoredMembership:
        """Returns the membership as it was last written, before or after a restart."""
        return await self._run("read", lambda: self._written)

    async def next_epoch(self, known: int = 0) -> int:
        """Returns the epoch of a new leader, which is stored: above all before, and above `known`."""
        return await self._run("epoch", lambda: self._next_epoch(known))

    async def begin(self, epoch: int) -> None:
        """Does nothing: no other orchestrator has the file."""

    async def refusals(self) -> tuple[StoredRefusal, ...]:
        return await self._run("read", self._read_refusals)

    async def save_refusals(self, refusals: Iterable[StoredRefusal]) -> None:
        rows = [astuple(each) for each in refusals]
        await self._run("refusals", lambda: self._replace("refusals", "(?, ?, ?, ?, ?, ?)", rows))

    async def halts(self) -> tuple[StoredHalt, ...]:
        return await self._run("read", self._read_halts)

    async def save_halts(self, halts: Iterable[StoredHalt]) -> None:
        rows = [(each.model, each.revision, each.reason, int(each.lasting)) for each in halts]
        await self._run("halts", lambda: self._replace("halts", "(?, ?, ?, ?)", rows))

    async def put_deployment(self, deployment: Deployment) -> None:
        facts = deployment_facts(deployment)
        names = _DEPLOYMENT.split(", ")[:-1]
        row = (*(facts.pop(name) for name in names), json.dumps(facts))
        statement = f"INSERT OR REPLACE INTO deployments ({_DEPLOYMENT}) VALUES (?, ?, ?, ?, ?, ?)"
        await self._run("deployment", lambda: self._write(statement, [row]))

    async def remove_deployment(self, model: str) -> None:
        await self._run("deployment", lambda: self._write("DELETE FROM deployments WHERE model = ?", [(model,)]))

    async def adapters(self) -> tuple[DeployedAdapter, ...]:
        return await self._run("read", self._read_adapters)

    async def put_adapter(self, adapter: DeployedAdapter) -> None:
        row = (adapter.name, adapter.model, adapter.path, int(adapter.pinned), adapter.revision)
        statement = "INSERT OR REPLACE INTO adapters (name, model, path, pinned, revision) VALUES (?, ?, ?, ?, ?)"
        await self._run("adapter", lambda: self._write(statement, [row]))

    async def remove_adapter(self, name: str) -> None:
        await self._run("adapter", lambda: self._write("DELETE FROM adapters WHERE name = ?", [(name,)]))

    async def save_membership(self, membership: StoredMembership) -> None:
        """Writes what differs from the last membership, in one transaction."""
        await self._run("membership", lambda: self._save_membership(membership))

    async def write(self, record: AuditRecord) -> None:
        """Keeps an operator's act. It is an `AuditSink`."""
        await self._run("audit", lambda: self._write_record(record))

    async def audit(self, query: AuditQuery) -> AuditPage:
        """Returns a page of operators' acts."""
        return await self._run("audit", lambda: read_records(self._connection, query))

    async def close(self) -> None:
        """Waits for running operations, then unlocks the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _run(self, operation: str, work: Callable[[], _T]) -> _T:
        started = time.monotonic()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            self._telemetry.store_errors.labels(operation).inc()
            log.error("store failed", operation=operation, error=str(error))
            raise errors.unavailable("STORE_UNAVAILABLE", f"the orchestrator's store failed: {error}") from error
        finally:
            self._telemetry.store_access.labels(operation).observe(time.monotonic() - started)

    def _connect(self) -> None:
        private_file(self._path)
        self._connection = sqlite3.connect(self._path, timeout=1.0, isolation_level=None)
        try:
            self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            # The file is small. What is damaged in it would be found by the first deployment.
            if (found := self._connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found.splitlines()[-1])
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreError(f"{self._path} has schema version {version}, the newest supported is {SCHEMA_VERSION}")
            if version == 1:
                self._connection.executescript(_FROM_VERSION_1)
            self._connection.executescript(_SCHEMA)
            if "bounds" not in [row[1] for row in self._connection.execute("PRAGMA table_info (deployments)")]:
                self._connection.execute(_WITH_BOUNDS)
            self._written = self._read_membership()
            self._read_deployments()
        except BaseException:
            self._connection.close()
            raise

    def _next_epoch(self, known: int) -> int:
        statement = (
            "INSERT INTO leading VALUES (1, ? + 1) ON CONFLICT (only) DO UPDATE SET epoch = max(epoch, ?) + 1 RETURNING epoch"
        )
        (row,) = self._connection.execute(statement, (known, known)).fetchall()
        return int(row[0])

    def _read_deployments(self) -> tuple[Deployment, ...]:
        rows = self._connection.execute(f"SELECT {_DEPLOYMENT} FROM deployments ORDER BY model")
        names = _DEPLOYMENT.split(", ")[:-1]
        return tuple(deployment_of(dict(zip(names, row, strict=False)) | json.loads(row[-1])) for row in rows)

    def _read_refusals(self) -> tuple[StoredRefusal, ...]:
        rows = self._connection.execute(
            "SELECT node_id, model, incarnation, revision, left_s, reason FROM refusals ORDER BY node_id, model"
        )
        return tuple(StoredRefusal(*row) for row in rows)

    def _read_halts(self) -> tuple[StoredHalt, ...]:
        rows = self._connection.execute("SELECT model, revision, reason, lasting FROM halts ORDER BY model")
        return tuple(StoredHalt(model, revision, reason, bool(lasting)) for model, revision, reason, lasting in rows)

    def _replace(self, table: str, values: str, rows: Sequence[tuple[str | int | float, ...]]) -> None:
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(f"DELETE FROM {table}")
            self._write(f"INSERT INTO {table} VALUES {values}", rows)

    def _read_adapters(self) -> tuple[DeployedAdapter, ...]:
        rows = self._connection.execute("SELECT name, model, path, pinned, revision FROM adapters ORDER BY name")
        return tuple(DeployedAdapter(name, model, path, bool(pinned), number) for name, model, path, pinned, number in rows)

    def _read_membership(self) -> StoredMembership:
        members = frozenset(row[0] for row in self._connection.execute("SELECT node_id FROM members"))
        return StoredMembership(members, dict(self._connection.execute("SELECT node_id, incarnation FROM drains").fetchall()))

    def _write(self, statement: str, rows: Iterable[tuple[str | int | float, ...]]) -> None:
        self._connection.executemany(statement, rows)

    def _write_record(self, record: AuditRecord) -> None:
        # SQLite would go on writing to a file that nobody finds any more.
        if not os.path.exists(self._path):
            raise sqlite3.OperationalError(f"{self._path} is gone")
        write_record(self._connection, record)

    def _save_membership(self, wanted: StoredMembership) -> None:
        drains, written = dict(wanted.drains), dict(self._written.drains)
        if wanted.members == self._written.members and drains == written:
            return
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._write("INSERT INTO members VALUES (?)", [(n,) for n in wanted.members - self._written.members])
            self._write("DELETE FROM members WHERE node_id = ?", [(n,) for n in self._written.members - wanted.members])
            self._write("DELETE FROM drains WHERE node_id = ?", [(n,) for n in written.keys() - drains.keys()])
            self._write("INSERT OR REPLACE INTO drains VALUES (?, ?)", sorted(drains.items() - written.items()))
        self._written = wanted


def _remedy(error: Exception) -> str:
    """Returns what to do about a file that cannot be opened; empty where the error says it.

    In a damaged file names may be no text, and statements may be wrong that are right otherwise.
    """
    if isinstance(error, OSError):
        return ""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return "make room or choose another file with --database"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return "it is damaged: restore it, or move it away to start without deployments"
    return ""
