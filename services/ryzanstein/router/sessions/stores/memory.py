"""Sessions in a dictionary: for tests, and for routers that may forget when they restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice

from ryzanstein import errors
from ryzanstein.generation.messages import Message
from ryzanstein.router.sessions.claims import LocalClaims
from ryzanstein.router.sessions.room import StoreRoom, bytes_of
from ryzanstein.router.sessions.store import (
    MOST_SCANNED,
    OBJECT_MARK,
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    extended,
    is_response,
    needed_by,
    page_of,
    read_page_token,
)
from ryzanstein.router.sessions.stores.memory_chains import ResponseChains

# What a session takes besides its messages.
_SESSION_BYTES = 1024


class MemorySessions:
    """A `SessionStore` that lives as long as the process.

    The dictionary of conversations is in the order of use; kept responses are in another one.
    """

    def __init__(self, bounds: SessionBounds, on_evicted: Callable[[int], None], room: StoreRoom | None = None) -> None:
        self._bounds = bounds
        self._on_evicted = on_evicted
        self._room = room or StoreRoom()
        self._conversations: dict[str, Session] = {}
        self._responses = ResponseChains()
        self._stored: dict[str, set[str]] = {}
        self._claims = LocalClaims()
        self._bytes = 0

    def _like(self, session_id: str) -> dict[str, Session]:
        """Returns the sessions of the same kind."""
        return self._responses.kept if is_response(session_id) else self._conversations

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
        if checked_id(session_id) in self._like(session_id):
            raise errors.already_exists("session", session_id)
        self._bounds.check(messages)
        if (needed := needed_by(session_id, parent)) and not self._responses.continuable(needed):
            raise errors.not_found("session", needed)
        now = time.time()
        session = Session(session_id, model, now, now, tuple(messages), tenant=tenant, parent=parent)
        if is_response(session_id):
            self._responses.add(session)
        else:
            self._conversations[session_id] = session
        self._uses(_SESSION_BYTES + bytes_of(messages))
        self._evict(session_id)
        return session

    def _evict(self, session_id: str) -> None:
        """Drops the least recently used ones until there is room, but not the session that was just written."""
        like, evicted, written = self._like(session_id), 0, session_id.removesuffix(OBJECT_MARK)
        oldest = self._responses.oldest if is_response(session_id) else self._oldest_conversation
        while len(like) > self._bounds.most_like(session_id) and (gone := oldest()) and gone.session_id != written:
            self._remove(gone.session_id)
            evicted += 1
        if evicted:
            self._on_evicted(evicted)
        evicted = 0
        while self._bytes > self._room.max_bytes and (gone := self._oldest(written)):
            self._remove(gone.session_id)
            evicted += 1
        if evicted:
            self._room.on_evicted(evicted)

    def _oldest(self, written: str) -> Session | None:
        both = (self._oldest_conversation(), self._responses.oldest())
        return min((each for each in both if each is not None and each.session_id != written), key=_order, default=None)

    def _oldest_conversation(self) -> Session | None:
        return next((each for each in self._conversations.values() if not self._claims.holds(each.session_id)), None)

    def _remove(self, session_id: str) -> None:
        gone = self._responses.delete(session_id) if is_response(session_id) else [self._conversations.pop(session_id)]
        self._stored.pop(session_id, None)
        self._uses(-sum(_SESSION_BYTES + bytes_of(each.messages) for each in gone))

    def _uses(self, num_bytes: int) -> None:
        self._bytes += num_bytes
        self._room.on_used(self._bytes)

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
        if (await self.get(session_id)).deleted:
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
            self._uses(bytes_of(messages))
        if generation_id:
            stored.add(generation_id)
            self._claims.turn_stored(session_id, generation_id)
        self._evict(session_id)
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
        self._responses = ResponseChains()


def _order(session: Session) -> tuple[float, str]:
    return session.update_time, session.session_id
