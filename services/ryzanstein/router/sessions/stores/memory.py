"""Sessions in a dictionary: for tests, and for routers that may forget when they restart.

A kept response may continue another, which then stays as long as it does.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from operator import itemgetter

from ryzanstein import errors
from ryzanstein.auth.caller import tenant_digest
from ryzanstein.generation.prompts import Message
from ryzanstein.router.sessions.claims import ClaimRequest, LocalClaims
from ryzanstein.router.sessions.room import SESSION_BYTES, StoreRoom, bytes_of
from ryzanstein.router.sessions.store import (
    OBJECT_MARK,
    Session,
    SessionBounds,
    SessionPage,
    checked_id,
    checked_page_size,
    digest_of,
    extended,
    is_object,
    is_response,
    needed_by,
    owner_of,
    page_of,
    read_page_token,
)

_STALE_ENTRIES = 64


class ResponseChains:
    """The responses with their objects. Those that no other one continues can be evicted: they are `leaves`."""

    def __init__(self) -> None:
        self.kept: dict[str, Session] = {}
        self._num_children: Counter[str] = Counter()
        # In the order of use, whatever the clock says. Entries of responses that are gone, or are no leaves any
        # more, are skipped.
        self._leaves: list[tuple[int, str]] = []
        self._used: dict[str, int] = {}
        self._uses = itertools.count()

    def add(self, session: Session) -> None:
        """Adds a response or an object. A response's parent, which must be there, is used by that."""
        self.kept[session.session_id] = session
        if is_object(session.session_id):
            return
        if session.parent:
            self._num_children[session.parent] += 1
            self.kept[session.parent] = replace(self.kept[session.parent], update_time=time.time())
            self._used[session.parent] = next(self._uses)
        self._used[session.session_id] = next(self._uses)
        self._is_leaf(session.session_id)

    def continuable(self, session_id: str) -> bool:
        return session_id in self.kept and not self.kept[session_id].deleted

    def oldest(self) -> Session | None:
        """Returns the leaf that was used least recently."""
        while self._leaves:
            used, session_id = self._leaves[0]
            if self._used.get(session_id) == used and not self._num_children[session_id]:
                return self.kept[session_id]
            heapq.heappop(self._leaves)
        return None

    def leaves(self) -> Iterator[Session]:
        """Yields the leaves, the least recently used one first."""
        for used, session_id in sorted(self._leaves):
            if self._used.get(session_id) == used and not self._num_children[session_id]:
                yield self.kept[session_id]

    def delete(self, session_id: str) -> list[Session]:
        """Deletes a response or an object. Returns what is gone: a response that others continue stays for those."""
        if self._num_children[session_id]:
            self.kept[session_id] = replace(self.kept[session_id], deleted=True)
            return []
        return list(self.removed(session_id))

    def removed(self, session_id: str) -> Iterator[Session]:
        """Removes a leaf with its object, and the deleted responses that only it continued. Yields them."""
        while session_id:
            session = self.kept.pop(session_id)
            self._used.pop(session_id, None)
            yield session
            if (alongside := self.kept.pop(session_id + OBJECT_MARK, None)) is not None:
                yield alongside
            session_id = self._unneeded(session.parent)

    def _unneeded(self, parent: str) -> str:
        """Counts one child less. Returns the parent if it was deleted and nothing continues it."""
        if parent not in self.kept:
            return ""
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return ""
        del self._num_children[parent]
        if self.kept[parent].deleted:
            return parent
        self._is_leaf(parent)
        return ""

    def _is_leaf(self, session_id: str) -> None:
        heapq.heappush(self._leaves, (self._used[session_id], session_id))
        if len(self._leaves) > 2 * len(self.kept) + _STALE_ENTRIES:
            self._leaves = [(used, each) for each, used in self._used.items() if not self._num_children[each]]
            heapq.heapify(self._leaves)


# Callers without a tenant have no share: without keys they are everybody.
_NOBODY = ("", tenant_digest(""))


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
        # By tenant of conversations, and by its digest of kept responses and their objects.
        self._num_owned: Counter[str] = Counter()
        self._claims = LocalClaims()
        self._bytes = 0
        self._bytes_of: Counter[str] = Counter()  # by owner, of both kinds

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
        self._num_owned[self._owner_key(session_id)] += 1
        self._uses(session, SESSION_BYTES + bytes_of(messages))
        self._evict(session_id)
        return session

    def _evict(self, session_id: str) -> None:
        """Drops the least recently used ones until there is room, but not the session that was just written."""
        like, written = self._like(session_id), session_id.removesuffix(OBJECT_MARK)
        is_kept = is_response(session_id)
        evicted = self._evict_own(session_id, written)
        oldest = self._responses.oldest if is_kept else self._oldest_conversation
        while len(like) > self._bounds.most_like(session_id) and (gone := oldest()) and gone.session_id != written:
            self._remove(gone.session_id)
            evicted += 1
        if evicted:
            self._on_evicted(evicted)
        evicted = 0
        while self._bytes > self._room.max_bytes and (gone := self._greedy(written) or self._oldest(written)):
            self._remove(gone.session_id)
            evicted += 1
        if evicted:
            self._room.on_evicted(evicted)

    def _evict_own(self, session_id: str, written: str) -> int:
        """Drops the oldest ones of the tenant that wrote this session, if it has more than its share. Returns how many."""
        owner, evicted = self._owner_key(session_id), 0
        most = self._bounds.most_of_a_tenant(session_id, owner)
        while owner not in _NOBODY and self._num_owned[owner] > most and (gone := self._oldest_of(owner, written)):
            self._remove(gone.session_id)
            evicted += 1
        return evicted

    def _oldest_of(self, owner: str, written: str) -> Session | None:
        if is_response(written):
            own = (each for each in self._responses.leaves() if digest_of(each.session_id) == owner)
        else:
            held = self._claims.holds
            own = (each for each in self._conversations.values() if each.tenant == owner and not held(each.session_id))
        return next((each for each in own if each.session_id != written), None)

    def _greedy(self, written: str) -> Session | None:
        """Returns the oldest session of the tenant that takes more than its share of the bytes, if one does."""
        owner, used = max(self._bytes_of.items(), key=itemgetter(1), default=("", 0))
        if used <= self._room.share:
            return None
        held = self._claims.holds
        conversations = (each for each in self._conversations.values() if not held(each.session_id))
        own = (
            next((each for each in kind if each.session_id != written and _owner(each) == owner), None)
            for kind in (conversations, self._responses.leaves())
        )
        return min((each for each in own if each is not None), key=_order, default=None)

    def _owner_key(self, session_id: str) -> str:
        return digest_of(session_id) if is_response(session_id) else self._conversations[session_id].tenant

    def _oldest(self, written: str) -> Session | None:
        both = (self._oldest_conversation(), self._responses.oldest())
        return min((each for each in both if each is not None and each.session_id != written), key=_order, default=None)

    def _oldest_conversation(self) -> Session | None:
        return next((each for each in self._conversations.values() if not self._claims.holds(each.session_id)), None)

    def _remove(self, session_id: str) -> None:
        gone = self._responses.delete(session_id) if is_response(session_id) else [self._conversations.pop(session_id)]
        self._stored.pop(session_id, None)
        for each in gone:
            self._num_owned[digest_of(each.session_id) if is_response(each.session_id) else each.tenant] -= 1
            self._uses(each, -SESSION_BYTES - bytes_of(each.messages))

    def _uses(self, session: Session, num_bytes: int) -> None:
        self._bytes += num_bytes
        if owner := _owner(session):
            self._bytes_of[owner] += num_bytes
            if not self._bytes_of[owner]:
                del self._bytes_of[owner]
        self._room.on_used(self._bytes)

    async def get(self, session_id: str) -> Session:
        session = self._like(session_id).get(session_id)
        if session is None:
            raise errors.not_found("session", session_id)
        return session

    async def owner(self, session_id: str) -> str | None:
        session = self._like(session_id).get(session_id)
        return None if session is None else session.tenant

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        size, start = checked_page_size(page_size), read_page_token(page_token)
        own = (each for each in self._conversations.values() if each.tenant == tenant)
        newest_first = sorted(own, key=_order, reverse=True)
        after = (replace(each, messages=()) for each in newest_first if not page_token or _order(each) < start)
        return page_of(list(islice(after, size + 1)), size)

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
            self._uses(session, bytes_of(messages))
        if generation_id:
            stored.add(generation_id)
            self._claims.turn_stored(session_id, generation_id)
        self._evict(session_id)
        return added

    async def claim(self, request: ClaimRequest) -> None:
        self._claims.claim(request)

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        return self._claims.renew(held, owner, ttl_s)

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        self._claims.release(session_id, generation_id, owner)

    def unwritten(self, session_id: str) -> bool:
        return False

    async def close(self) -> None:
        self._conversations.clear()
        self._responses = ResponseChains()


def _owner(session: Session) -> str:
    return owner_of(session.session_id, session.tenant)


def _order(session: Session) -> tuple[float, str]:
    return session.update_time, session.session_id
