"""The sessions that this router used last, as it last knew them, for answers during an outage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ryzanstein.router.sessions.store import Session

_CHARS_PER_ENTRY = 256


class Changes(Protocol):
    """Detects changes of sessions by other routers, as far as this router can see them."""

    def mark(self, session_id: str) -> int:
        """Returns a mark, which differs after each change."""

    def is_ours(self, session_id: str) -> bool:
        """Returns whether the last change was this router's."""


class NoChanges:
    """For a store that no other router changes, or that reports it (`RecentSessions.forget`)."""

    def mark(self, session_id: str) -> int:
        return 0

    def is_ours(self, session_id: str) -> bool:
        return True


class RecentSessions:
    """A cache of sessions, bounded by sessions and characters. It evicts the least recently used.

    None stands for a session that is known not to exist. Sessions that are not in the store yet, as
    `is_pending` says, are kept. Any other session that another router changed, as `changes` says,
    is no longer known.
    """

    def __init__(
        self, max_sessions: int, max_chars: int, is_pending: Callable[[str], bool], changes: Changes | None = None
    ) -> None:
        self._max_sessions = max_sessions
        self._max_chars = max_chars
        self._is_pending = is_pending
        self._changes = changes if changes is not None else NoChanges()
        self._known: dict[str, Session | None] = {}
        self._marks: dict[str, int] = {}
        self._chars = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._known and self._holds(session_id)

    def get(self, session_id: str) -> Session | None:
        """Returns the session. Raises KeyError when nothing is known of it."""
        if session_id not in self:
            raise KeyError(session_id)
        session = self._known.pop(session_id)
        self._known[session_id] = session
        return session

    def mark(self, session_id: str) -> int:
        """Returns a mark for `put`. Take it before the session is read."""
        return self._changes.mark(session_id)

    def put(self, session_id: str, session: Session | None, mark: int | None = None) -> None:
        """Stores what is known of a session.

        `mark`: taken before it was read; without one, this router has just changed the session.
        """
        self._drop(session_id)
        self._known[session_id] = session
        if mark is not None:
            self._marks[session_id] = mark
        self._chars += _chars(session)
        if self._full:
            self._evict()

    def forget(self, session_id: str) -> None:
        """Forgets a session that another router changed."""
        if not self._is_pending(session_id):
            self._drop(session_id)

    def forget_all(self) -> None:
        for session_id in list(self._known):
            self.forget(session_id)

    def _holds(self, session_id: str) -> bool:
        if self._is_pending(session_id) or self._changes.is_ours(session_id):
            return True
        return self._marks.get(session_id) == self._changes.mark(session_id)

    def _drop(self, session_id: str) -> None:
        self._marks.pop(session_id, None)
        if session_id in self._known:
            self._chars -= _chars(self._known.pop(session_id))

    @property
    def _full(self) -> bool:
        return len(self._known) > self._max_sessions or self._chars > self._max_chars

    def _evict(self) -> None:
        for session_id in list(self._known):
            if not self._full:
                return
            self.forget(session_id)


def _chars(session: Session | None) -> int:
    return _CHARS_PER_ENTRY + (0 if session is None else sum(message.num_chars for message in session.messages))
