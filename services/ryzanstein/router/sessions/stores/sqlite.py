"""Sessions in one SQLite file: they survive a restart, and routers on one host share them.

The file is in a state directory. All statements run in the store's own thread, so the event loop
never waits for a disk. Write-ahead log, synchronous NORMAL: a crash of the process loses nothing, a
power cut at most the last turns.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ryzanstein import errors
from ryzanstein.generation.messages import Message
from ryzanstein.router.sessions.store import (
    MOST_SCANNED,
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    is_response,
    page_of,
    read_page_token,
)
from ryzanstein.router.sessions.stores.message_rows import message_of, readable, row_of
from ryzanstein.router.sessions.stores.sqlite_changes import SqliteChanges
from ryzanstein.router.sessions.stores.sqlite_claims import SqliteClaims
from ryzanstein.router.sessions.stores.sqlite_file import CONVERSATIONS, RESPONSES, as_unavailable, connect, transaction

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
    ) -> None:
        self.changes = changes
        self._connection = connection
        self._claims = SqliteClaims(connection)
        self._thread = thread
        self._bounds = bounds
        self._on_evicted = on_evicted

    @classmethod
    async def open(cls, path: Path, bounds: SessionBounds, on_evicted: Callable[[int], None]) -> SqliteSessions:
        """Opens the file. Raises what `connect` raises."""
        thread = ThreadPoolExecutor(1, "sessions")
        loop = asyncio.get_running_loop()
        try:
            connection = await loop.run_in_executor(thread, connect, path)
            changes = SqliteChanges(path.with_name(path.name + "-changes"))
        except BaseException:
            thread.shutdown()
            raise
        return cls(connection, thread, bounds, on_evicted, changes)

    async def create(
        self, session_id: str, model: str, messages: Sequence[Message] = (), *, tenant: str = "", fresh: bool = False
    ) -> Session:
        checked_id(session_id)
        self._bounds.check(messages)
        session, evicted = await self._run(lambda: self._create(session_id, model, tuple(messages), tenant))
        if evicted:
            self._on_evicted(evicted)
        return session

    async def get(self, session_id: str) -> Session:
        return await self._run(lambda: self._get(session_id))

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        size, start = checked_page_size(page_size), read_page_token(page_token)
        return await self._run(lambda: self._list(size, start, tenant))

    async def delete(self, session_id: str) -> None:
        await self._run(lambda: self._delete(session_id))

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        return await self._run(lambda: self._append(session_id, messages, model, node_id, generation_id))

    async def claim(
        self, session_id: str, generation_id: str, owner: str, ttl_s: float, *, gone: str = "", expired_of: str = ""
    ) -> None:
        await self._run(lambda: self._claims.claim(session_id, generation_id, owner, ttl_s, gone=gone, expired_of=expired_of))

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        return await self._run(lambda: self._claims.renew(held, owner, ttl_s))

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        await self._run(lambda: self._claims.release(session_id, generation_id, owner))

    async def close(self) -> None:
        await self._run(self._connection.close)
        self._thread.shutdown()
        self.changes.close()

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        with as_unavailable():
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _create(self, session_id: str, model: str, messages: tuple[Message, ...], tenant: str) -> tuple[Session, int]:
        now = time.time()
        with self.changes.changing(session_id), transaction(db := self._connection):
            try:
                db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, '')", (session_id, model, now, now))
            except sqlite3.IntegrityError:
                raise errors.already_exists("session", session_id) from None
            if tenant:
                db.execute("INSERT INTO tenants VALUES (?, ?)", (session_id, tenant))
            self._insert(session_id, 0, messages)
            evicted = self._evict(session_id)
        return Session(session_id, model, now, now, messages, tenant=tenant), evicted

    def _evict(self, session_id: str) -> int:
        """Deletes the least recently used ones of the kind that this session has, if there are too many.

        Never this one itself: by a clock that was set back it may be the oldest.
        """
        kind = RESPONSES if is_response(session_id) else CONVERSATIONS
        (count,) = self._connection.execute(f"SELECT count(*) FROM sessions WHERE {kind}").fetchone()
        surplus = int(count) - self._bounds.most_like(session_id)
        if surplus <= 0:
            return 0
        others = f"SELECT session_id FROM sessions WHERE {kind} AND session_id != ? ORDER BY update_time, session_id LIMIT ?"
        self._connection.execute(f"DELETE FROM sessions WHERE session_id IN ({others})", (session_id, surplus))
        return surplus

    def _get(self, session_id: str) -> Session:
        with transaction(db := self._connection, "DEFERRED"):
            row = db.execute(f"SELECT {_COLUMNS} FROM {_SESSIONS} WHERE session_id = ?", (session_id,)).fetchone()
            if row is None:
                raise errors.not_found("session", session_id)
            columns = "CAST(role AS BLOB), CAST(content AS BLOB)"
            query = f"SELECT {columns} FROM messages WHERE session_id = ? ORDER BY position"
            rows = db.execute(query, (session_id,)).fetchall()
        with readable(session_id):
            messages = tuple(message_of(role.decode(), content.decode()) for role, content in rows)
        return _session(row, messages)

    def _list(self, size: int, start: tuple[float, str], tenant: str) -> SessionPage:
        query = (
            f"SELECT {_COLUMNS} FROM {_SESSIONS} WHERE {CONVERSATIONS} AND (update_time, session_id) < (?, ?)"
            " ORDER BY update_time DESC, session_id DESC LIMIT ?"
        )
        num_scanned = MOST_SCANNED if tenant else size + 1
        rows = self._connection.execute(query, (*start, num_scanned)).fetchall()
        return page_of([_session(row, ()) for row in rows], size, tenant, more=len(rows) == num_scanned)

    def _delete(self, session_id: str) -> None:
        with self.changes.changing(session_id), transaction(db := self._connection):
            if not db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,)).rowcount:
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
            (count,) = db.execute("SELECT count(*) FROM messages WHERE session_id = ?", (session_id,)).fetchone()
            self._insert(session_id, count, messages)
        return True

    def _insert(self, session_id: str, position: int, messages: Sequence[Message]) -> None:
        rows = [(session_id, position + i, *row_of(message)) for i, message in enumerate(messages)]
        self._connection.executemany("INSERT INTO messages VALUES (?, ?, ?, ?)", rows)


def _session(row: tuple[str, str, float, float, str, str], messages: tuple[Message, ...]) -> Session:
    session_id, model, create_time, update_time, node_id, tenant = row
    return Session(session_id, model, create_time, update_time, messages, node_id, tenant)
