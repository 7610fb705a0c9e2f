"""Sessions in a dictionary: for tests, and for routers that may forget when they restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from ryzanstein import errors
from ryzanstein.generation import Message
from ryzanstein.router.sessions.claims import LocalClaims
from ryzanstein.router.sessions.store import (
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    extended,
    page_token,
    read_page_token,
)


class MemorySessions:
    """A `SessionStore` that lives as long as the process. The dictionary is in the order of use."""

    def __init__(self, bounds: SessionBounds, on_evicted: Callable[[int], None]) -> None:
        self._bounds = bounds
        self._on_evicted = on_evicted
        self._sessions: dict[str, Session] = {}
        self._stored: dict[str, set[str]] = {}
        self._claims = LocalClaims()

    async def create(self, session_id: str, model: str, messages: Sequence[Message] = (), *, fresh: bool = False) -> Session:
        if checked_id(session_id) in self._sessions:
            raise errors.already_exists("session", session_id)
        self._bounds.check(messages)
        now = time.time()
        session = self._sessions[session_id] = Session(session_id, model, now, now, tuple(messages))
        self._evict()
        return session

    def _evict(self) -> None:
        surplus = len(self._sessions) - self._bounds.max_sessions
        for session_id in list(self._sessions)[: max(0, surplus)]:
            del self._sessions[session_id]
            self._stored.pop(session_id, None)
        if surplus > 0:
            self._on_evicted(surplus)

    async def get(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise errors.not_found("session", session_id)
        return session

    async def list(self, page_size: int = 0, page_token: str = "") -> SessionPage:
        size, start = checked_page_size(page_size), read_page_token(page_token)
        newest_first = sorted(self._sessions.values(), key=_order, reverse=True)
        after = [s for s in newest_first if not page_token or _order(s) < start]
        page = tuple(replace(session, messages=()) for session in after[:size])
        return SessionPage(page, _next_token(page, len(after) > size))

    async def delete(self, session_id: str) -> None:
        if self._sessions.pop(session_id, None) is None:
            raise errors.not_found("session", session_id)
        self._stored.pop(session_id, None)

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        session = await self.get(session_id)
        stored = self._stored.setdefault(session_id, set())
        if added := generation_id not in stored:
            del self._sessions[session_id]
            self._sessions[session_id] = extended(session, messages, model, node_id)
        if generation_id:
            stored.add(generation_id)
            self._claims.turn_stored(session_id, generation_id)
        return added

    async def claim(
        self, session_id: str, generation_id: str, owner: str, ttl_s: float, *, gone: str = "", expired_of: str = ""
    ) -> None:
        self._claims.claim(session_id, generation_id, owner, ttl_s, gone=gone, expired_of=expired_of)

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        return self._claims.renew(held, owner, ttl_s)

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        self._claims.release(session_id, generation_id, owner)

    def unwritten(self, session_id: str) -> bool:
        return False

    async def close(self) -> None:
        self._sessions.clear()


def _order(session: Session) -> tuple[float, str]:
    return session.update_time, session.session_id


def _next_token(page: Sequence[Session], more: bool) -> str:
    return page_token(page[-1]) if more else ""
