"""The names of sessions in the stores: each tenant has its own ids.

A session of a tenant is stored under `~DIGEST~ID`, one of nobody under its id. So all that is kept by
the name of a session is apart: messages, turns, claims, what is remembered and what waits to be
written. Versions up to the one before this stored every session under its id, with its tenant beside
it: such a session is still found there by its tenant, and stays there.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from ryzanstein import errors
from ryzanstein.auth.caller import tenant_digest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import Message
from ryzanstein.router.sessions.store import Session, SessionPage, SessionStore, is_response

_Result = TypeVar("_Result")
_OWNED = re.compile(r"~[0-9a-f]{16}~")


def store_name(tenant: str, session_id: str) -> str:
    """Returns the name under which a tenant's session is stored."""
    return f"~{tenant_digest(tenant)}~{session_id}" if tenant else session_id


def shown_id(name: str) -> str:
    """Returns the id that the session with this name has for its tenant."""
    owned = _OWNED.match(name)
    return name[owned.end() :] if owned else name


def is_reserved(session_id: str) -> bool:
    """Whether an id of a client could be a name of the stores: it names no session, and none is made with it."""
    return is_response(session_id) or _OWNED.match(session_id) is not None


@contextmanager
def shown() -> Iterator[None]:
    """Shows ids of clients in errors, where the stores have their own names."""
    try:
        yield
    except RyzansteinError as error:
        if _OWNED.search(error.message) is None:
            raise
        error.message = _OWNED.sub("", error.message)
        error.args = (error.message,)
        error.metadata = {key: _OWNED.sub("", value) for key, value in error.metadata.items()}
        if error.resource is not None:
            error.resource = (error.resource[0], shown_id(error.resource[1]))
        raise


class OwnedSessions:
    """The sessions of a store as their tenants see them.

    `unowned_tenant` also has the sessions of nobody, which were made before there were keys.
    """

    def __init__(self, store: SessionStore, unowned_tenant: str = "") -> None:
        self._store = store
        self._unowned = unowned_tenant

    async def legacy_name(self, tenant: str, session_id: str) -> str | None:
        """Returns the name of a tenant's session as an earlier version stored it; None if there is none.

        To be asked when there is none under the tenant's own name. Nothing of the session is read but
        whose it is, so that it takes the same time for every other tenant's session.
        """
        if not tenant:
            return None
        owner = await self._store.owner(session_id)
        is_own = owner is not None and (owner == tenant or (owner == "" and tenant == self._unowned))
        return session_id if is_own else None

    async def create(self, tenant: str, session_id: str, model: str, messages: Sequence[Message], *, fresh: bool) -> Session:
        """Creates a session. Raises ALREADY_EXISTS where the tenant has the id already."""
        with shown():
            if not fresh and await self.legacy_name(tenant, session_id) is not None:
                raise errors.already_exists("session", session_id)
            name = store_name(tenant, session_id)
            return _shown(await self._store.create(name, model, messages, tenant=tenant, fresh=fresh))

    async def get(self, tenant: str, session_id: str) -> Session:
        """Returns a session with its messages. Raises NOT_FOUND, also for a kept response and what is another tenant's."""
        return _shown(await self._found(tenant, session_id, self._store.get))

    async def delete(self, tenant: str, session_id: str) -> None:
        """Deletes a session. Raises NOT_FOUND as `get` does."""
        await self._found(tenant, session_id, self._store.delete)

    async def _found(self, tenant: str, session_id: str, use: Callable[[str], Awaitable[_Result]]) -> _Result:
        """Uses a session under its own name, or under that of an earlier version."""
        if is_reserved(session_id):
            raise errors.not_found("session", session_id)
        with shown():
            try:
                return await use(store_name(tenant, session_id))
            except RyzansteinError as error:
                legacy = await self.legacy_name(tenant, session_id) if error.code is Code.NOT_FOUND else None
                if legacy is None:
                    raise
            return await use(legacy)

    async def list(self, tenant: str, page_size: int, page_token: str) -> SessionPage:
        """Returns a page of the tenant's sessions, see `SessionStore.list`."""
        page = await self._store.list(page_size, page_token, tenant=tenant)
        return replace(page, sessions=tuple(map(_shown, page.sessions)))


def _shown(session: Session) -> Session:
    return replace(session, session_id=shown_id(session.session_id))
