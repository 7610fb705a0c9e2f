"""A journal in one SQLite file, for the routers on one host.

It outlives processes, but not the host, because all its routers end with the host. So nothing waits
for the disk (synchronous OFF), and a file that is damaged or from an earlier boot starts empty, also
while routers use it: what they have they write again. Times are
those of CLOCK_MONOTONIC, which all processes of a host share and no clock jump affects.
All statements run in the journal's own thread. There are few of them, and they are long: at each
statement, and at each row that it returns, the interpreter lock changes hands between that thread
and the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ryzanstein.router.journal.journal import (
    EXPIRED_KEEP_S,
    KEY_HOLD_S,
    LAST_KNOWN_KEEP_S,
    Append,
    AppendOutcome,
    Head,
    JournalRecord,
    JournalUnavailableError,
    KeyClaim,
    Owner,
)
from ryzanstein.router.journal.stores.sqlite_file import JournalFile
from ryzanstein.router.storage import sqlite_room as disk
from ryzanstein.router.storage.bounds import UNBOUNDED
from ryzanstein.router.storage.sqlite_damage import is_damage

_Result = TypeVar("_Result")
_Row = tuple[Any, ...]


class SqliteJournal:
    """A `Journal` in a file. Create it with `open`; `close` waits for running statements."""

    def __init__(self, file: JournalFile, thread: ThreadPoolExecutor, lease_s: float, retention_s: float) -> None:
        self._file = file
        self._thread = thread
        self._lost = False
        self._lease_s = lease_s
        self._retention_s = retention_s

    @classmethod
    async def open(cls, path: Path, lease_s: float, retention_s: float, max_bytes: int = UNBOUNDED) -> SqliteJournal:
        """Opens the file. Raises OSError or sqlite3.Error when it cannot be used.

        A write that would make the file larger than `max_bytes` is refused as on a full disk.
        """
        thread = ThreadPoolExecutor(1, "journal")
        try:
            file = await asyncio.get_running_loop().run_in_executor(thread, JournalFile, path, max_bytes)
        except BaseException:
            thread.shutdown()
            raise
        return cls(file, thread, lease_s, retention_s)

    async def write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        return await self._run(lambda: self._write(owner, appends))

    async def remove(self, generations: Sequence[tuple[str, int]]) -> None:
        await self._run(lambda: self._remove(generations))

    async def head(self, generation_id: str) -> Head | None:
        return await self._run(lambda: self._head(generation_id))

    async def take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        return await self._run(lambda: self._take(generation_id, epoch, owner))

    async def claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        return await self._run(lambda: self._claim_key(key, claim, keep_s))

    async def free_key(self, key: str, generation_id: str) -> None:
        await self._run(lambda: self._free_key(key, generation_id))

    async def renew(self, owner: Owner) -> None:
        await self._run(lambda: self._renew(owner))

    async def find(self, owner_id: str) -> Owner | None:
        return await self._run(lambda: self._find(owner_id, time.monotonic()))

    async def last_known(self, owner_id: str) -> Owner | None:
        return await self._run(lambda: self._find(owner_id, time.monotonic() - LAST_KNOWN_KEEP_S))

    async def owners(self) -> list[Owner]:
        return await self._run(self._owners)

    async def resign(self, owner: Owner) -> None:
        await self._run(lambda: self._resign(owner))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise JournalUnavailableError(str(error)) from error

    def _done(self, work: Callable[[], _Result]) -> _Result:
        """Does the work, on the file that has the name now. A damaged one is replaced for the next call."""
        self._lost = self._file.follow() or self._lost
        try:
            return work()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if is_damage(error):
                self._lost = self._file.begin_anew(error) or self._lost
            raise

    def _tell_of_loss(self) -> None:
        """Raises once after the file was begun anew: this router then writes all that it has again."""
        if self._lost:
            self._lost = False
            raise JournalUnavailableError("the journal was begun anew")

    def _found(self, row: _Row | None) -> _Row | None:
        """Returns the row. Raises while other routers may not have written what they have into a new file."""
        if row is None and time.monotonic() - self._file.anew_at < self._lease_s:
            raise JournalUnavailableError("the journal was begun anew a moment ago")
        return row

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Takes the write lock at once, so that what is read is still true when it is written."""
        db = self._file.connection
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _write(self, owner: Owner, appends: Sequence[Append]) -> list[AppendOutcome]:
        self._tell_of_loss()
        with self._transaction() as db:
            known = _known(db, [append.generation_id for append in appends])
            outcomes = [self._checked(db, owner, append, known) for append in appends]
            written = [append for append, outcome in zip(appends, outcomes, strict=True) if outcome is AppendOutcome.WRITTEN]
            numbers = sorted({known[append.generation_id][0] for append in written})
            if numbers:
                update = f"UPDATE generations SET expires = ?, written = ? WHERE number IN ({','.join('?' * len(numbers))})"
                db.execute(update, (self._expires, time.monotonic(), *numbers))
            values: list[int | bytes] = []
            for append in written:
                if append.batch:
                    values += (known[append.generation_id][0], append.batch)
            if values:
                db.execute(f"INSERT INTO batches VALUES {','.join(['(?, ?)'] * (len(values) // 2))}", values)
        return outcomes

    def _checked(
        self, db: sqlite3.Connection, owner: Owner, append: Append, known: dict[str, tuple[int, int]]
    ) -> AppendOutcome:
        """Returns WRITTEN if the append may be written. Opens its generation if requested."""
        generation_id = append.generation_id
        if generation_id not in known:
            if append.request is None:
                query = "SELECT 1 FROM expired WHERE generation_id = ? AND epoch = ?"
                expired = db.execute(query, (generation_id, append.epoch)).fetchone() is not None
                return AppendOutcome.EXPIRED if expired else AppendOutcome.MISSING
            known[generation_id] = (self._open(db, owner, append, append.request), append.epoch)
            return AppendOutcome.WRITTEN
        _, epoch = known[generation_id]
        return AppendOutcome.WRITTEN if epoch == append.epoch else AppendOutcome.FENCED

    def _open(self, db: sqlite3.Connection, owner: Owner, append: Append, request: bytes) -> int:
        """Inserts the generation and returns its number."""
        values = (append.generation_id, owner.owner_id, owner.address, append.epoch, self._expires)
        db.execute("DELETE FROM expired WHERE generation_id = ?", (append.generation_id,))
        insert = "INSERT INTO generations (generation_id, owner_id, address, epoch, expires) VALUES (?, ?, ?, ?, ?)"
        number = db.execute(insert, values).lastrowid
        assert number is not None
        db.execute("INSERT INTO requests VALUES (?, ?)", (number, request))
        return number

    @property
    def _expires(self) -> float:
        return time.monotonic() + self._retention_s

    def _remove(self, generations: Sequence[tuple[str, int]]) -> None:
        with self._transaction() as db:
            query = "DELETE FROM generations WHERE generation_id = ? AND epoch = ? RETURNING number"
            for generation in generations:
                _forget(db, db.execute(query, generation).fetchall())

    def _head(self, generation_id: str) -> Head | None:
        now = time.monotonic()
        self._count_absence(now)
        query = "SELECT owner_id, address, epoch FROM generations WHERE generation_id = ? AND expires > ?"
        row = self._found(self._file.connection.execute(query, (generation_id, now)).fetchone())
        return None if row is None else Head(Owner(row[0], row[1]), row[2])

    def _take(self, generation_id: str, epoch: int, owner: Owner) -> JournalRecord | None:
        update = (
            "UPDATE generations SET owner_id = ?, address = ?, epoch = epoch + 1, expires = ?"
            " WHERE generation_id = ? AND epoch = ? AND expires > ? RETURNING number, written"
        )
        self._count_absence(time.monotonic())
        with self._transaction() as db:
            now = time.monotonic()
            values = (owner.owner_id, owner.address, self._expires, generation_id, epoch, now)
            row = db.execute(update, values).fetchone()
            if row is None:
                return None
            number, written = row
            (request,) = db.execute("SELECT request FROM requests WHERE number = ?", (number,)).fetchone()
            query = "SELECT batch FROM batches WHERE number = ? ORDER BY rowid"
            batches = tuple(batch for (batch,) in db.execute(query, (number,)))
        return JournalRecord(epoch + 1, request, batches, 0.0 if written is None else max(0.0, now - written))

    def _claim_key(self, key: str, claim: KeyClaim, keep_s: float) -> KeyClaim | None:
        now = time.monotonic()
        self._count_absence(now)
        query = (
            "SELECT keys.generation_id, body, generations.expires > :now AS begun FROM keys LEFT JOIN generations"
            " USING (generation_id) WHERE key = :key AND generation_id != :own AND (begun OR held > :now)"
        )
        with self._transaction() as db:
            row = db.execute(query, {"key": key, "own": claim.generation_id, "now": now}).fetchone()
            if row is not None:
                return KeyClaim(row[0], row[1], bool(row[2]))
            # A generation that another router has not yet written again may have the key.
            self._found(db.execute("SELECT 1 FROM generations WHERE generation_id = ?", (claim.generation_id,)).fetchone())
            values = (key, claim.generation_id, claim.body, now + KEY_HOLD_S, now + max(keep_s, KEY_HOLD_S))
            db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, ?, ?)", values)
        return None

    def _free_key(self, key: str, generation_id: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM keys WHERE key = ? AND generation_id = ?", (key, generation_id))

    def _renew(self, owner: Owner) -> None:
        self._tell_of_loss()
        now = time.monotonic()
        self._count_absence(now)
        with self._transaction() as db:
            if owner.address:
                db.execute("INSERT OR REPLACE INTO attended VALUES (1, ?)", (now,))
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (owner.owner_id, owner.address, now + self._lease_s))
            db.execute("INSERT OR REPLACE INTO public_addresses VALUES (?, ?)", (owner.owner_id, owner.public))
            db.execute("DELETE FROM leases WHERE expires <= ?", (now - LAST_KNOWN_KEEP_S,))
            db.execute("DELETE FROM public_addresses WHERE owner_id NOT IN (SELECT owner_id FROM leases)")
            expired = "DELETE FROM generations WHERE expires <= ? RETURNING number, generation_id, epoch"
            gone = db.execute(expired, (now,)).fetchall()
            _forget(db, [(number,) for number, *_ in gone])
            until = now + EXPIRED_KEEP_S
            db.executemany("INSERT OR REPLACE INTO expired VALUES (?, ?, ?)", [(*which, until) for _, *which in gone])
            db.execute("DELETE FROM expired WHERE until <= ?", (now,))
            db.execute("DELETE FROM keys WHERE expires <= ?", (now,))
        if disk.can_shrink(self._file.connection):
            disk.shrink(self._file.connection)

    def _count_absence(self, now: float) -> None:
        """Prolongs all that is kept by the time in which no client could come, because no router was there."""
        query = "SELECT at FROM attended WHERE at < ?"
        if self._file.connection.execute(query, (now - self._lease_s,)).fetchone() is None:
            return
        with self._transaction() as db:
            if (row := db.execute(query, (now - self._lease_s,)).fetchone()) is not None:
                absent_s = now - row[0]
                db.execute("UPDATE generations SET expires = expires + ?", (absent_s,))
                db.execute("UPDATE keys SET expires = expires + ?", (absent_s,))
                db.execute("UPDATE attended SET at = ?", (now,))

    def _find(self, owner_id: str, since: float) -> Owner | None:
        """Returns an owner whose lease is valid, or expired after `since`."""
        query = "SELECT address FROM leases WHERE owner_id = ? AND expires > ?"
        row = self._found(self._file.connection.execute(query, (owner_id, since)).fetchone())
        return None if row is None else Owner(owner_id, row[0])

    def _owners(self) -> list[Owner]:
        query = """
            SELECT owner_id, leases.address, public_addresses.address FROM leases JOIN public_addresses USING (owner_id)
            WHERE expires > ? ORDER BY expires DESC
        """
        return [Owner(*row) for row in self._file.connection.execute(query, (time.monotonic(),))]

    def _resign(self, owner: Owner) -> None:
        with self._transaction() as db:
            for table in ("leases", "public_addresses"):
                db.execute(f"DELETE FROM {table} WHERE owner_id = ?", (owner.owner_id,))


def _known(db: sqlite3.Connection, generation_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns number and epoch of those of the generations that exist, read as one row."""
    places = ",".join("?" * len(generation_ids))
    columns = "json_group_array(json_array(generation_id, number, epoch))"
    query = f"SELECT {columns} FROM generations WHERE generation_id IN ({places})"
    (rows,) = db.execute(query, generation_ids).fetchone()
    return {generation_id: (number, epoch) for generation_id, number, epoch in json.loads(rows)}


def _forget(db: sqlite3.Connection, numbers: Sequence[tuple[int]]) -> None:
    db.executemany("DELETE FROM requests WHERE number = ?", numbers)
    db.executemany("DELETE FROM batches WHERE number = ?", numbers)
