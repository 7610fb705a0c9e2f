"""Claims in the sessions' SQLite file: they serialize the turns of several routers on one host.

Times are those of the machine's monotonic clock, which all its processes share, so setting the
clock ends no claim.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Set

from ryzanstein.router.sessions.claims import EXPIRED_CLAIM_KEEP_S, Claim, SessionBusyError
from ryzanstein.router.sessions.stores.sqlite_file import transaction


class SqliteClaims:
    """The claims table. Called in the store's thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def claim(self, session_id: str, generation_id: str, owner: str, ttl_s: float, *, gone: str, expired_of: str) -> None:
        with transaction(self._connection):
            mine = Claim(generation_id, owner, time.monotonic(), ttl_s)
            self._sweep(mine.taken_at)
            held = self._held(session_id)
            if held is not None and held.forbids(mine, gone, expired_of):
                expired = not held.holds(mine.taken_at)
                raise SessionBusyError(session_id, held.generation_id, held.owner, expired=expired)
            self._take(session_id, mine)

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
