"""A session store that may fail without failing a request.

Recent sessions stay in memory, and writes wait until the store is back. No request waits for the
store longer than `wait_s`, except lists and reads of sessions that are not in memory. While the
store fails, sessions that this router used recently are read from memory and new turns are queued.
A session that is unknown here is refused (UNAVAILABLE, SESSION_STORE_UNAVAILABLE): it is never
answered without its history. What is queued is lost if this router dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import structlog
from pydantic import Field

from ryzanstein import errors
from ryzanstein.bounds import PositiveSize, Size
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.resilient.outage import Backlog, StoreOutage, Write
from ryzanstein.router.sessions.resilient.recent import Changes, RecentSessions
from ryzanstein.router.sessions.store import (
    Session,
    SessionBounds,
    SessionPage,
    SessionStore,
    StoreUnavailableError,
    checked_id,
    extended,
    is_response,
    store_unavailable,
    unexpected,
)
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")
# No answer waits for a list, and listing many sessions takes time.
_LIST_WAIT_S = 2.0
_UNKNOWN_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class OutagePolicy:
    """How long requests wait for the store, and what is kept in memory while it fails."""

    wait_s: Annotated[float, Field(ge=0.01, le=10)] = 0.25
    """How long a request waits for the store before it continues without it, in seconds."""
    recent_sessions: Size = 10_000
    """Sessions kept in memory."""
    recent_chars: Size = 64_000_000
    """Characters of these sessions."""
    backlog_writes: PositiveSize = 10_000
    """Writes that are queued."""
    backlog_chars: PositiveSize = 64_000_000
    """Characters of these writes."""


class ResilientSessions:
    """A `ServingStore` on top of another store, which it closes with itself."""

    def __init__(
        self,
        store: SessionStore,
        bounds: SessionBounds,
        policy: OutagePolicy,
        telemetry: RouterTelemetry,
        changes: Changes | None = None,
    ) -> None:
        self._store = store
        self._bounds = bounds
        self._wait_s = policy.wait_s
        self._telemetry = telemetry
        self._backlog = Backlog(policy.backlog_writes, policy.backlog_chars, telemetry)
        self._outage = StoreOutage(store, self._backlog, telemetry)
        self.recent = RecentSessions(policy.recent_sessions, policy.recent_chars, self._backlog.touches, changes)

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
        kept = tuple(messages)
        self._forget_changed(session_id)

        def create(store: SessionStore) -> Awaitable[Session]:
            return store.create(session_id, model, kept, tenant=tenant, fresh=fresh, parent=parent)

        if not self._outage.active:
            try:
                session = await self._bounded(create(self._store))
                self.recent.put(session_id, session)
                return session
            except StoreUnavailableError as error:
                self._outage.begin(error)
        if not fresh and self._remembered(session_id) is not None:
            raise errors.already_exists("session", session_id)
        self._check_room(session_id)
        now = time.time()
        session = Session(session_id, model, now, now, kept, tenant=tenant, parent=parent)
        self._queue(session_id, kept, Code.ALREADY_EXISTS, create)
        self.recent.put(session_id, session)
        return session

    async def get(self, session_id: str) -> Session:
        """Returns a session.

        One that is in memory is not waited for. One that is not is waited for longer: otherwise it
        would have to be refused.
        """
        known = session_id in self.recent
        if not self._backlog.touches(session_id) and not (known and self._outage.reads_fail):
            try:
                return await self._read(session_id, self._wait_s if known else max(self._wait_s, _UNKNOWN_WAIT_S))
            except StoreUnavailableError as error:
                self._outage.begin(error, reading=True)
        return self._existing(session_id)

    async def _read(self, session_id: str, wait_s: float) -> Session:
        mark = self.recent.mark(session_id)
        try:
            session = await self._bounded(self._store.get(session_id), wait_s)
        except RyzansteinError as error:
            if error.code is Code.NOT_FOUND and not self._backlog.touches(session_id):
                self.recent.put(session_id, None, mark)
            raise
        if self._backlog.touches(session_id):  # changed here while the store read it
            return self._existing(session_id)
        self.recent.put(session_id, session, mark)
        return session

    async def owner(self, session_id: str) -> str | None:
        """Returns the tenant of a session, from memory where the store cannot say."""
        if not self._backlog.touches(session_id) and not self._outage.reads_fail:
            try:
                return await self._bounded(self._store.owner(session_id), max(self._wait_s, _UNKNOWN_WAIT_S))
            except StoreUnavailableError as error:
                self._outage.begin(error, reading=True)
        session = self._remembered(session_id)
        return None if session is None else session.tenant

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        """Returns what is in the store.

        The sessions in memory are not a full list, so this fails while the store cannot be read.
        """
        if self._outage.reads_fail:
            raise store_unavailable("sessions cannot be listed while the session store is unavailable")
        try:
            return await self._bounded(self._store.list(page_size, page_token, tenant=tenant), max(self._wait_s, _LIST_WAIT_S))
        except StoreUnavailableError as error:
            self._outage.begin(error, reading=True)
            raise

    async def delete(self, session_id: str) -> None:
        self._forget_changed(session_id)
        if not self._outage.active:
            try:
                await self._bounded(self._store.delete(session_id))
                self._remember_deleted(session_id)
                return
            except StoreUnavailableError as error:
                self._outage.begin(error)
        if (await self.get(session_id)).deleted:
            raise errors.not_found("session", session_id)
        # The outage may have ended meanwhile: what is queued then would not be written.
        if not self._outage.active:
            await self.delete(session_id)
            return
        self._check_room(session_id)
        self._queue(session_id, (), Code.NOT_FOUND, lambda store: store.delete(session_id))
        self._remember_deleted(session_id)

    def _remember_deleted(self, session_id: str) -> None:
        """Remembers that a session is gone. Other responses may continue one that is known here, and need it."""
        known = self.recent.get(session_id) if is_response(session_id) and session_id in self.recent else None
        self.recent.put(session_id, None if known is None else replace(known, deleted=True))

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        """Adds a turn.

        The turn is queued even when the store raises an unexpected error: its answer was already
        given. A queued turn is written before this returns if the store is back: its client may ask
        the next question at another router.
        """
        turn = tuple(messages)
        self._forget_changed(session_id)

        def append(store: SessionStore) -> Awaitable[bool]:
            return store.append(session_id, turn, model=model, node_id=node_id, generation_id=generation_id)

        if not self._outage.active:
            try:
                return self._added(await self._bounded(append(self._store)), session_id, turn, model, node_id)
            except StoreUnavailableError as error:
                self._outage.begin(error)
            except RyzansteinError:
                raise
            except Exception as error:
                log.exception("session turn not written, queued for retry", session_id=session_id)
                self._outage.begin(unexpected(error))
        if generation_id and self._backlog.has_turn(generation_id):
            return False
        session = self._existing(session_id) if session_id in self.recent else None
        self._queue(session_id, turn, Code.NOT_FOUND, append, generation_id)
        if session is not None:
            self._added(True, session_id, turn, model, node_id)
        await self._outage.retry(self._wait_s)
        return True

    def _added(self, added: bool, session_id: str, turn: tuple[Message, ...], model: str, node_id: str) -> bool:
        """Adds the turn to the remembered session.

        A turn that was stored before may or may not be in it: then the session is forgotten.
        """
        session = self.recent.get(session_id) if session_id in self.recent else None
        if session is not None and added:
            self.recent.put(session_id, extended(session, turn, model, node_id))
        else:
            self.recent.forget(session_id)
        return added

    async def claim(self, request: ClaimRequest) -> None:
        """Claims a session.

        While the store fails every claim succeeds: routers cannot know of each other, and each
        serializes its own turns. The store may be back although the outage is not over: a turn
        without a claim would then be hidden from other routers.
        """
        self._check_room(request.session_id)
        await self._outage.retry(self._wait_s)
        if self._outage.active:
            return
        try:
            await self._bounded(self._store.claim(request))
        except StoreUnavailableError as error:
            self._outage.begin(error)

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        if self._outage.active:
            return set()
        try:
            return await self._bounded(self._store.renew(held, owner, ttl_s))
        except StoreUnavailableError as error:
            self._outage.begin(error)
            return set()

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        """Releases a claim. A claim that cannot be released expires."""
        if self._outage.active:
            return
        try:
            await self._bounded(self._store.release(session_id, generation_id, owner))
        except StoreUnavailableError as error:
            self._outage.begin(error)

    def unwritten(self, session_id: str) -> bool:
        return self._backlog.touches(session_id)

    async def close(self) -> None:
        await self._outage.close()
        await self._store.close()

    async def _bounded(self, work: Awaitable[_Result], wait_s: float | None = None) -> _Result:
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            async with asyncio.timeout(wait_s):
                return await work
        except TimeoutError:
            raise store_unavailable(f"the session store did not answer within {wait_s:g} s") from None

    def _forget_changed(self, session_id: str) -> None:
        """Forgets a session that another router changed, before this router changes it.

        The change would mark what is known here as current, even if the store refuses it.
        """
        if session_id not in self.recent:
            self.recent.forget(session_id)

    def _remembered(self, session_id: str) -> Session | None:
        """Returns what is in memory; None for a session that is known not to exist.

        Raises UNAVAILABLE when nothing is known.
        """
        try:
            session = self.recent.get(session_id)
        except KeyError:
            what = f"session {session_id[:128]!r} is not in this router's memory and the session store is unavailable"
            raise store_unavailable(what, session_id) from None
        self._telemetry.store_from_memory.inc()
        return session

    def _existing(self, session_id: str) -> Session:
        session = self._remembered(session_id)
        if session is None:
            raise errors.not_found("session", session_id)
        return session

    def _check_room(self, session_id: str) -> None:
        if self._backlog.full:
            what = f"the session store is unavailable and its backlog is full ({len(self._backlog)} writes)"
            raise store_unavailable(what, session_id)

    def _queue(
        self,
        session_id: str,
        added: Sequence[Message],
        done_by: Code,
        apply: Callable[[SessionStore], Awaitable[object]],
        generation_id: str = "",
    ) -> None:
        chars = sum(message.num_chars for message in added)
        self._backlog.add(Write(session_id, chars, done_by, apply, generation_id))
