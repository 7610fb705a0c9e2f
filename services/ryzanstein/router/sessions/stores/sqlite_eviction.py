"""Eviction from the sessions' SQLite file: by number, and by the bytes that the file uses.

The bytes are those of the file's pages, so that indexes and half-empty pages count, too. A write
evicts a few sessions itself, and steps in the background do the rest.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time

from ryzanstein.auth.caller import tenant_digest
from ryzanstein.router.sessions.room import StoreRoom
from ryzanstein.router.sessions.store import MOST_EVICTED, OBJECT_MARK, SessionBounds, digest_of, is_response
from ryzanstein.router.sessions.stores.sqlite_chains import SqliteChains
from ryzanstein.router.sessions.stores.sqlite_file import CONVERSATIONS, RESPONSES, transaction
from ryzanstein.router.storage import sqlite_room as disk

_UNCLAIMED = (
    "NOT EXISTS (SELECT 1 FROM claims WHERE session_id = sessions.session_id AND taken_at <= :now AND :now < taken_at + ttl_s)"
)
_OLD_CONVERSATIONS = (
    f"SELECT update_time, CAST(session_id AS BLOB) FROM sessions WHERE {CONVERSATIONS}"
    f" AND session_id != :written AND {_UNCLAIMED} ORDER BY update_time, session_id LIMIT :most"
)
_OLD_RESPONSES = (
    "SELECT used, CAST(session_id AS BLOB) FROM responses WHERE num_children = 0 AND session_id != :written"
    " ORDER BY used, session_id LIMIT :most"
)
_COUNT_OWN = "SELECT count(*) FROM tenants WHERE tenant = :owner"
_OLD_OWN = (
    "SELECT update_time, CAST(session_id AS BLOB) FROM tenants CROSS JOIN sessions USING (session_id)"
    f" WHERE tenant = :owner AND session_id != :written AND {_UNCLAIMED} ORDER BY update_time, session_id LIMIT :most"
)
# Names of a tenant's responses are from its digest to what follows that in the alphabet.
_COUNT_OWN_RESPONSES = "SELECT count(*) FROM sessions WHERE session_id > :owner AND session_id < :owner || '~'"
_OLD_OWN_RESPONSES = (
    "SELECT used, CAST(session_id AS BLOB) FROM responses WHERE num_children = 0 AND session_id > :owner"
    " AND session_id < :owner || '~' AND session_id != :written ORDER BY used, session_id LIMIT :most"
)
# Of a tenant above its share so many go at once: to find its oldest ones, all of its own are looked at.
_OWN_AT_ONCE = 64
_GREEDIEST = "SELECT owner, sum(bytes) FROM owned_bytes GROUP BY owner ORDER BY 2 DESC LIMIT 1"
_OLD_OF_GREEDIEST = (
    "SELECT update_time, CAST(session_id AS BLOB) FROM owned_bytes CROSS JOIN sessions USING (session_id)"
    f" WHERE owner = :owner AND {CONVERSATIONS} AND session_id != :written AND {_UNCLAIMED}"
    " ORDER BY update_time, session_id LIMIT :most"
)
_BYTES = "SELECT bytes FROM owned_bytes WHERE session_id = CAST(? AS TEXT)"
# All rows are added up for it, some ten milliseconds for a full store: not at each write.
_ADDED_UP_S = 1.0
# From so much of the bound on, sessions are evicted: what is left over is for writes that come faster.
_SPARE_SHARE = 16
_MOST_AT_A_WRITE = 16


class SqliteEviction:
    """Evicts. Called in the store's thread."""

    def __init__(self, connection: sqlite3.Connection, chains: SqliteChains, bounds: SessionBounds, room: StoreRoom) -> None:
        self._connection = connection
        self._chains = chains
        self._bounds = bounds
        self._room = room
        self._most_used = room.max_bytes - room.max_bytes // _SPARE_SHARE
        self._written = ""
        self._added_up_at = -_ADDED_UP_S
        self._reserve = min(disk.RESERVE_BYTES, room.max_bytes // (2 * _SPARE_SHARE))

    def over_share(self, session_id: str, tenant: str) -> int:
        """Deletes the least recently used ones of the tenant that wrote this session, if it has too many; returns how many."""
        kept = is_response(session_id)
        owner = digest_of(session_id) if kept else tenant
        if owner in ("", tenant_digest("")):  # without keys they are everybody
            return 0
        count, oldest = (_COUNT_OWN_RESPONSES, _OLD_OWN_RESPONSES) if kept else (_COUNT_OWN, _OLD_OWN)
        (num_own,) = self._connection.execute(count, {"owner": owner}).fetchone()
        most = self._bounds.most_of_a_tenant(session_id, tenant)
        if num_own <= most:
            return 0
        values = {"owner": owner, "written": session_id.removesuffix(OBJECT_MARK), "now": time.monotonic()}
        at_once = min(int(num_own) - most + min(_OWN_AT_ONCE, most // 64), MOST_EVICTED)
        rows = self._connection.execute(oldest, values | {"most": at_once}).fetchall()
        for _, oldest_id in rows:
            self._remove(oldest_id)
        return len(rows)

    def surplus(self, session_id: str) -> int:
        """Deletes the least recently used ones of the kind that this session has, if there are too many; returns how many."""
        kind, oldest = (RESPONSES, _OLD_RESPONSES) if is_response(session_id) else (CONVERSATIONS, _OLD_CONVERSATIONS)
        (count,) = self._connection.execute(f"SELECT count(*) FROM sessions WHERE {kind}").fetchone()
        surplus = int(count) - self._bounds.most_like(session_id)
        if surplus <= 0:
            return 0
        num_evicted = 0
        for _, oldest_id in self._oldest(oldest, session_id, min(surplus, MOST_EVICTED)):
            surplus -= self._remove(oldest_id)
            num_evicted += 1
            if surplus <= 0:
                break
        return num_evicted

    def make_room(self, session_id: str, num_bytes: int) -> None:
        """Deletes some of the least recently used sessions of either kind, if these bytes would be too many.

        Within the transaction of a write. So many go at least that the file can take the bytes, whose pages
        may be half empty.
        """
        self._written = session_id
        num_evicted = self._evict_greedy(session_id) if self._is_short_of(num_bytes, 0) else 0
        while self._is_short_of(num_bytes, num_evicted) and self._evict_oldest(session_id):
            num_evicted += 1
        if num_evicted:
            self._room.on_evicted(num_evicted)

    def _evict_greedy(self, written: str) -> int:
        """Evicts sessions of the tenant that takes more than its share of the bytes, if one does; returns how many."""
        now = time.monotonic()
        if now < self._added_up_at + _ADDED_UP_S:
            return 0
        owner, used = self._connection.execute(_GREEDIEST).fetchone() or ("", 0)
        surplus, num_evicted = used - self._room.share, 0
        if surplus <= 0:
            self._added_up_at = now
            return 0
        values = {"owner": owner, "written": written.removesuffix(OBJECT_MARK), "most": _OWN_AT_ONCE}
        conversations = self._connection.execute(_OLD_OF_GREEDIEST, values | {"now": now}).fetchall()
        responses = self._connection.execute(_OLD_OWN_RESPONSES, values).fetchall()
        for _, name in sorted([*conversations, *responses])[:_OWN_AT_ONCE]:
            surplus -= self._owned_by(name)
            num_evicted += self._remove(name) > 0
            if surplus <= 0:
                break
        if not num_evicted:  # all are claimed
            self._added_up_at = now
        return num_evicted

    def _owned_by(self, name: bytes) -> int:
        """Returns the bytes of a session, and of the object with it."""
        names = (name, name + OBJECT_MARK.encode())
        rows = [self._connection.execute(_BYTES, (each,)).fetchone() for each in names]
        return sum(row[0] for row in rows if row is not None)

    def _is_short_of(self, num_bytes: int, num_evicted: int) -> bool:
        used = disk.used_bytes(self._connection)
        if used + 2 * num_bytes > disk.capacity(self._connection) - self._reserve:
            return True
        return num_evicted < _MOST_AT_A_WRITE and used + num_bytes > self._most_used

    def look(self) -> bool:
        """Tells how many bytes are used. Returns whether there is something for `step` to do."""
        used = disk.used_bytes(self._connection)
        self._room.on_used(used)
        return used > self._most_used or disk.can_shrink(self._connection, self._reserve)

    def step(self) -> bool:
        """Evicts some sessions, or gives back some free pages. Returns whether there may be more to do."""
        if disk.used_bytes(self._connection) <= self._most_used:
            if disk.can_shrink(self._connection, self._reserve):
                disk.shrink(self._connection, self._reserve)
                disk.bound(self._connection, self._room.max_bytes)
            return self.look()
        before = disk.used_bytes(self._connection)
        with transaction(self._connection):
            # Never the last one that was written: by a clock that was set back it may be the oldest.
            self.make_room(self._written, 0)
        # All that is left may be claimed: the next write looks again.
        return self.look() and disk.used_bytes(self._connection) < before

    def _evict_oldest(self, written: str) -> bool:
        found = [row for query in (_OLD_CONVERSATIONS, _OLD_RESPONSES) for row in self._oldest(query, written, 1)]
        return bool(found) and self._remove(min(found)[1]) > 0

    def _remove(self, name: bytes) -> int:
        """Removes a session. What is left of a damaged one is in the way of others: it goes by its row."""
        with contextlib.suppress(UnicodeDecodeError):
            if num_removed := self._chains.remove(name.decode()):
                return num_removed
        statements = (f"DELETE FROM {table} WHERE session_id = CAST(? AS TEXT)" for table in ("sessions", "responses"))
        return sum(self._connection.execute(statement, (name,)).rowcount for statement in statements)

    def _oldest(self, query: str, written: str, most: int) -> list[tuple[float, bytes]]:
        values = {"written": written.removesuffix(OBJECT_MARK), "most": most, "now": time.monotonic()}
        if ":now" not in query:
            del values["now"]
        return self._connection.execute(query, values).fetchall()
