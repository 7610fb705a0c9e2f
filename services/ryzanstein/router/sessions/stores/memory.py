"""Sessions in a dictionary: for tests, and for routers that may forget when they restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice

from ryzanstein import errors
from ryzanstein.generation.messages import Message
from ryzanstein.router.sessions.claims import LocalClaims
from ryzanstein.router.sessions.store import (
    MOST_SCANNED,
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    extended,
    is_response,
    page_of,
    read_page_token,
)


class MemorySessions:
    """A `SessionStore` that lives as long as the process.

    Its dictionaries, of conversations and of what is kept of responses, are in the order of use.
    """

    def __init__(self, bounds: SessionBounds, on_evicted: Callable[[int], None]) -> None:
        self._bounds = bounds
        self._on_evicted = on_evicted
        self._conversations: dict[str, Session] = {}
        self._responses: dict[str, Session] = {}
        self._stored: dict[str, set[str]] = {}
        self._claims = LocalClaims()

    def _like(self, session_id: str) -> dict[str, Session]:
        """Returns the sessions of the same kind."""
        return self._responses if is_response(session_id) else self._conversations

    async def create(
        self, session_id: str, model: str, messages: Sequence[Message] = (), *, tenant: str = "", fresh: bool = False
    ) -> Session:
        if checked_id(session_id) in self._like(session_id):
            raise errors.already_exists("session", session_id)
        self._bounds.check(messages)
        now = time.time()
        session = self._like(session_id)[session_id] = Session(session_id, model, now, now, tuple(messages), tenant=tenant)
        self._evict(session_id)
        return session

    def _evict(self, session_id: str) -> None:
        """Drops the least recently used ones of the kind that this session has, if there are too many."""
        like = self._like(session_id)
        surplus = len(like) - self._bounds.most_like(session_id)
        if surplus <= 0:
            return
        for oldest in list(islice(like, surplus)):
            self._remove(oldest)
        self._on_evicted(surplus)

    def _remove(self, session_id: str) -> None:
        del self._like(session_id)[session_id]
        self._stored.pop(session_id, None)

    async def get(self, session_id: str) -> Session:
        session = self._like(session_id).get(session_id)
        if session is None:
            raise errors.not_found("session", session_id)
        return session

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        size, start = checked_page_size(page_size), read_page_token(page_token)
        newest_first = sorted(self._conversations.values(), key=_order, reverse=True)
        after = (replace(each, messages=()) for each in newest_first if not page_token or _order(each) < start)
        num_scanned = MOST_SCANNED if tenant else size + 1
        scanned = list(islice(after, num_scanned))
        return page_of(scanned, size, tenant, more=len(scanned) == num_scanned)

    async def delete(self, session_id: str) -> None:
        if session_id not in self._like(session_id):
            raise errors.not_found("session", session_id)
        self._remove(session_id)

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        session, like = await self.get(session_id), self._like(session_id)
        stored = self._stored.setdefault(session_id, set())
        if added := generation_id not in stored:
            del like[session_id]
            like[session_id] = extended(session, messages, model, node_id)
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
        self._conversations.clear()
        self._responses.clear()


def _order(session: Session) -> tuple[float, str]:
    return session.update_time, session.session_id
