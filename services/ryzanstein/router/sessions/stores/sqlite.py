"""Sessions in one SQLite file: they survive a restart, and routers on one host share them.

The file is in a state directory. All statements run in the store's own thread, so the event loop
never waits for a disk. Write-ahead log, synchronous NORMAL: a crash of the process loses nothing, a
power cut at most the last turns.

Claims serialize the turns of several routers on one host. Their times are those of the machine's
monotonic clock, which all its processes share, so setting the clock ends no claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ryzanstein import errors
from ryzanstein.generation.prompts import Message
from ryzanstein.router.sessions.claims import EXPIRED_CLAIM_KEEP_S, Claim, ClaimRequest, SessionBusyError
from ryzanstein.router.sessions.room import SESSION_BYTES, StoreRoom, bytes_of
from ryzanstein.router.sessions.store import (
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    owner_of,
    page_of,
    read_page_token,
)
from ryzanstein.router.sessions.stores.message_rows import read_rows, readable, rows_of
from ryzanstein.router.sessions.stores.sqlite_chains import SqliteChains
from ryzanstein.router.sessions.stores.sqlite_changes import SqliteChanges
from ryzanstein.router.sessions.stores.sqlite_eviction import SqliteEviction
from ryzanstein.router.sessions.stores.sqlite_file import CONVERSATIONS, as_unavailable, connect, transaction


class SqliteClaims:
    """The claims table. Called in the store's thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def claim(self, request: ClaimRequest) -> None:
        with transaction(self._connection):
            now = time.monotonic()
            self._sweep(now)
            held = self._held(request.session_id)
            if held is not None and held.forbids(request, now):
                raise SessionBusyError(request.session_id, held.generation_id, held.owner, expired=not held.holds(now))
            self._take(request.session_id, Claim.of(request, now))

    def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        lost = set()
        with transaction(self._connection):
            now = time.monotonic()
            self._sweep(now)
            for session_id, generation_id in held.items():
                mine = Claim(generation_id, owner, now, ttl_s)
                if mine.yields_to(self._held(session_id)):
                    lost.add(session_id)
                else:
                    self._take(session_id, mine)
        return lost

    def release(self, session_id: str, generation_id: str, owner: str) -> None:
        statement = "DELETE FROM claims WHERE session_id = ? AND generation_id = ? AND owner = ?"
        with transaction(self._connection):
            self._connection.execute(statement, (session_id, generation_id, owner))
            self._sweep(time.monotonic())

    def turn_stored(self, session_id: str, generation_id: str) -> None:
        """Ends the generation's claim, within a transaction.

        The generation's turn is stored, by whichever router.
        """
        statement = "DELETE FROM claims WHERE session_id = ? AND generation_id = ?"
        self._connection.execute(statement, (session_id, generation_id))

    def _held(self, session_id: str) -> Claim | None:
        query = "SELECT generation_id, owner, taken_at, ttl_s FROM claims WHERE session_id = ?"
        row = self._connection.execute(query, (session_id,)).fetchone()
        return None if row is None else Claim(*row)

    def _take(self, session_id: str, claim: Claim) -> None:
        values = (session_id, claim.generation_id, claim.owner, claim.taken_at, claim.ttl_s)
        self._connection.execute("INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", values)

    def _sweep(self, now: float) -> None:
        """Deletes the claims of dead routers, which nothing releases.

        At each change: the last claim of a dead router may be the last claim of all.
        """
        statement = "DELETE FROM claims WHERE taken_at + ttl_s <= ? OR taken_at > ?"
        self._connection.execute(statement, (now - EXPIRED_CLAIM_KEEP_S, now))


_COLUMNS = "session_id, model, create_time, update_time, node_id, coalesce(tenant, '')"
_SESSIONS = "sessions LEFT JOIN tenants USING (session_id)"
_Result = TypeVar("_Result")


class SqliteSessions:
    """A `SessionStore` in a file. Create it with `open`; `close` waits for running statements."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        thread: ThreadPoolExecutor,
        bounds: SessionBounds,
        on_evicted: Callable[[int], None],
        changes: SqliteChanges,
        *,
        room: StoreRoom,
    ) -> None:
        self.changes = changes
        self._connection = connection
        self._claims = SqliteClaims(connection)
        self._thread = thread
        self._bounds = bounds
        self._on_evicted = on_evicted
        self._chains = SqliteChains(connection)
        self._eviction = SqliteEviction(connection, self._chains, bounds, room)
        self._tending = self._closing = False

    @classmethod
    async def open(
        cls, path: Path, bounds: SessionBounds, on_evicted: Callable[[int], None], room: StoreRoom | None = None
    ) -> SqliteSessions:
        """Opens the file. Raises what `connect` raises."""
        room = room or StoreRoom()
        thread = ThreadPoolExecutor(1, "sessions")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, connect, path, room.max_bytes)
            changes = SqliteChanges(path.with_name(path.name + "-changes"))
        except BaseException:
            thread.shutdown()
            raise
        return cls(connection, thread, bounds, on_evicted, changes, room=room)

    async def create(
        self,
        session_id: str,
        model: str,
        messages: Sequence[Message] = (),
        *,
        tenant: str = "",
        fresh: bool = False,
        parent: str = "",
    ) -> Session:
        checked_id(session_id)
        self._bounds.check(messages)
        session, evicted = await self._write(lambda: self._create(session_id, model, tuple(messages), tenant, parent))
        if evicted:
            self._on_evicted(evicted)
        return session

    async def get(self, session_id: str) -> Session:
        return await self._run(lambda: self._get(session_id))

    async def owner(self, session_id: str) -> str | None:
        return await self._run(lambda: self._owner(session_id))

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        size, start = checked_page_size(page_size), read_page_token(page_token)
        return await self._run(lambda: self._list(size, start, tenant))

    async def delete(self, session_id: str) -> None:
        await self._write(lambda: self._delete(session_id))

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        return await self._write(lambda: self._append(session_id, messages, model, node_id, generation_id))

    async def claim(self, request: ClaimRequest) -> None:
        await self._run(lambda: self._claims.claim(request))

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        return await self._run(lambda: self._claims.renew(held, owner, ttl_s))

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        await self._run(lambda: self._claims.release(session_id, generation_id, owner))

    async def close(self) -> None:
        self._closing = True
        await self._run(self._connection.close)
        self._thread.shutdown()
        self.changes.close()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        with as_unavailable():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _write(self, work: Callable[[], _Result]) -> _Result:
        def write() -> _Result:
            done = work()
            if not self._tending and self._eviction.look():
                self._tending = True
                self._thread.submit(self._tend)
            return done

        return await self._run(write)

    def _tend(self) -> None:
        """Takes a step of eviction. The next one is behind what waits for the thread meanwhile."""
        more = False
        with contextlib.suppress(sqlite3.Error):  # the next write tries again
            more = not self._closing and self._eviction.step()
        self._tending = more
        if more:
            self._thread.submit(self._tend)

    def _create(
        self, session_id: str, model: str, messages: tuple[Message, ...], tenant: str, parent: str
    ) -> tuple[Session, int]:
        now = time.time()
        with self.changes.changing(session_id), transaction(db := self._connection):
            self._chains.admit(session_id, parent)
            self._eviction.make_room(session_id, bytes_of(messages))
            try:
                db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, '')", (session_id, model, now, now))
            except sqlite3.IntegrityError:
                raise errors.already_exists("session", session_id) from None
            if tenant:
                db.execute("INSERT INTO tenants VALUES (?, ?)", (session_id, tenant))
            if owner := owner_of(session_id, tenant):
                size = SESSION_BYTES + bytes_of(messages)
                db.execute("INSERT INTO owned_bytes VALUES (?, ?, ?)", (session_id, owner, size))
            self._insert(session_id, 0, rows_of(parent, messages))
            evicted = self._eviction.over_share(session_id, tenant) + self._eviction.surplus(session_id)
        return Session(session_id, model, now, now, messages, tenant=tenant, parent=parent), evicted

    def _get(self, session_id: str) -> Session:
        with transaction(db := self._connection, "DEFERRED"):
            row = db.execute(f"SELECT {_COLUMNS} FROM {_SESSIONS} WHERE session_id = ?", (session_id,)).fetchone()
            if row is None:
                raise errors.not_found("session", session_id)
            columns = "CAST(role AS BLOB), CAST(content AS BLOB)"
            query = f"SELECT {columns} FROM messages WHERE session_id = ? ORDER BY position"
            rows = db.execute(query, (session_id,)).fetchall()
            deleted = self._chains.is_deleted(session_id)
        with readable(session_id):
            parent, messages = read_rows([(role.decode(), content.decode()) for role, content in rows])
        return replace(_session(row, messages), parent=parent, deleted=deleted)

    def _list(self, size: int, start: tuple[float, str], tenant: str) -> SessionPage:
        # Those of a tenant by the index of owners, those of nobody in the order of their use.
        sessions = "tenants CROSS JOIN sessions USING (session_id)" if tenant else _SESSIONS
        query = (
            f"SELECT {_COLUMNS} FROM {sessions} WHERE {CONVERSATIONS} AND coalesce(tenant, '') = ?"
            " AND (update_time, session_id) < (?, ?) ORDER BY update_time DESC, session_id DESC LIMIT ?"
        )
        if tenant:
            query = query.replace("coalesce(tenant, '') = ?", "tenant = ?")
        rows = self._connection.execute(query, (tenant, *start, size + 1)).fetchall()
        return page_of([_session(row, ()) for row in rows], size)

    def _owner(self, session_id: str) -> str | None:
        query = f"SELECT coalesce(tenant, '') FROM {_SESSIONS} WHERE session_id = ?"
        row = self._connection.execute(query, (session_id,)).fetchone()
        return None if row is None else str(row[0])

    def _delete(self, session_id: str) -> None:
        with self.changes.changing(session_id), transaction(self._connection):
            if not self._chains.delete(session_id):
                raise errors.not_found("session", session_id)

    def _append(self, session_id: str, messages: Sequence[Message], model: str, node_id: str, generation_id: str) -> bool:
        with self.changes.changing(session_id), transaction(db := self._connection):
            if not db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)).fetchone():
                raise errors.not_found("session", session_id)
            if generation_id:
                turn = (session_id, generation_id)
                self._claims.turn_stored(*turn)
                if not db.execute("INSERT OR IGNORE INTO turns VALUES (?, ?)", turn).rowcount:
                    return False
            update = (
                "UPDATE sessions SET model = CASE model WHEN '' THEN ? ELSE model END, update_time = ?, node_id = ?"
                " WHERE session_id = ?"
            )
            db.execute(update, (model, time.time(), node_id, session_id))
            self._eviction.make_room(session_id, size := bytes_of(messages))
            db.execute("UPDATE owned_bytes SET bytes = bytes + ? WHERE session_id = ?", (size, session_id))
            (count,) = db.execute("SELECT count(*) FROM messages WHERE session_id = ?", (session_id,)).fetchone()
            self._insert(session_id, count, rows_of("", messages))
        return True

    def _insert(self, session_id: str, position: int, rows: Sequence[tuple[str, str]]) -> None:
        values = [(session_id, position + i, *row) for i, row in enumerate(rows)]
        self._connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", values)


def _session(row: tuple[str, str, float, float, str, str], messages: tuple[Message, ...]) -> Session:
    session_id, model, create_time, update_time, node_id, tenant = row
    return Session(session_id, model, create_time, update_time, messages, node_id, tenant)
