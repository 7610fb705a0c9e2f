"""Kept responses in the sessions' SQLite file: each may continue another, which then stays as long as it does.

The table `responses` has when each was used and how many others continue it. What one continues is
its first row of messages.
"""

from __future__ import annotations

import sqlite3
import time

from ryzanstein import errors
from ryzanstein.router.sessions.store import OBJECT_MARK, is_object, is_response
from ryzanstein.router.sessions.stores.message_rows import CONTINUES


class SqliteChains:
    """The chains of responses. Called in the store's thread, within a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def admit(self, session_id: str, parent: str) -> None:
        """Prepares for a session that is created. Raises NOT_FOUND where a response that it needs is gone."""
        if is_object(session_id):
            response_id = session_id.removesuffix(OBJECT_MARK)
            found = self._connection.execute("SELECT 1 FROM responses WHERE session_id = ? AND NOT deleted", (response_id,))
            if found.fetchone() is None:
                raise errors.not_found("session", response_id)
        elif parent:
            update = "UPDATE responses SET num_children = num_children + 1, used = ? WHERE session_id = ? AND NOT deleted"
            if not self._connection.execute(update, (time.time(), parent)).rowcount:
                raise errors.not_found("session", parent)

    def is_deleted(self, session_id: str) -> bool:
        query = "SELECT 1 FROM responses WHERE session_id = ? AND deleted"
        return is_response(session_id) and self._connection.execute(query, (session_id,)).fetchone() is not None

    def delete(self, session_id: str) -> bool:
        """Deletes a session, or has a response that others continue stay for those. Returns False where there is none."""
        query = "SELECT num_children, deleted FROM responses WHERE session_id = ?"
        num_children, deleted = self._connection.execute(query, (session_id,)).fetchone() or (0, 0)
        if deleted:
            return False
        if num_children:
            self._connection.execute("UPDATE responses SET deleted = 1 WHERE session_id = ?", (session_id,))
            return True
        return self.remove(session_id) > 0

    def remove(self, session_id: str) -> int:
        """Removes a session; a response with its object and the deleted ones that only it continued. Returns how many."""
        if not is_response(session_id):
            return self._connection.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,)).rowcount
        num_removed = 0
        while session_id:
            parent = self._parent(session_id)
            both = (session_id, session_id + OBJECT_MARK)
            num_removed += self._connection.execute("DELETE FROM sessions WHERE session_id IN (?, ?)", both).rowcount
            session_id = self._unneeded(parent) if parent else ""
        return num_removed

    def _parent(self, session_id: str) -> str:
        query = "SELECT content FROM messages WHERE session_id = ? AND position = 0 AND role = ?"
        row = self._connection.execute(query, (session_id, CONTINUES)).fetchone()
        return "" if row is None else str(row[0])

    def _unneeded(self, parent: str) -> str:
        """Counts one child less. Returns the parent if it was deleted and nothing continues it."""
        update = (
            "UPDATE responses SET num_children = max(num_children - 1, 0) WHERE session_id = ? RETURNING num_children, deleted"
        )
        row = self._connection.execute(update, (parent,)).fetchone()
        return parent if row == (0, 1) else ""
