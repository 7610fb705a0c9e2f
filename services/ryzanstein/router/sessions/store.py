"""What a session is, and the interface of a session store.

Both faces read the store; a generation appends its turn when it ends. This module knows no gRPC, no
HTTP and no node: `node_id` is only stored.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

from ryzanstein import errors
from ryzanstein.auth.caller import tenant_digest
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import MAX_NAME_CHARS, Message
from ryzanstein.router.sessions.claims import ClaimRequest
from ryzanstein.router.sessions.room import MESSAGE_BYTES, bytes_of
from ryzanstein.router.storage.bounds import UNBOUNDED

MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100
MOST_EVICTED = 100
"""Sessions that one write evicts at most, so that it does not keep others waiting."""
_MOST_CHAR_BYTES = 4


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation.

    Times are Unix seconds; `node_id` answered last, empty before the first answer. `tenant` is whose
    it is, empty if nobody was named when it began or it is from an earlier version. `parent` is the
    kept response that this one continues: `messages` are only what was said after it. `deleted`: it is
    kept only for those that continue it.
    """

    session_id: str
    model: str
    create_time: float
    update_time: float
    messages: tuple[Message, ...] = ()
    node_id: str = ""
    tenant: str = ""
    parent: str = ""
    deleted: bool = False


def extended(session: Session, messages: Sequence[Message], model: str, node_id: str) -> Session:
    """Returns the session with one more turn, updated now."""
    return replace(
        session,
        model=session.model or model,
        messages=(*session.messages, *messages),
        update_time=time.time(),
        node_id=node_id,
    )


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions without messages, last used first; `next_page_token` is empty on the last page."""

    sessions: tuple[Session, ...]
    next_page_token: str


def _no_other_bound(tenant: str) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """How much a store keeps.

    Above `max_sessions` the least recently used session is evicted, and that is counted. What is kept
    of responses, see `is_response`, counts against `max_responses` instead: of those that no other
    response continues, the least recently used one is evicted, with its object. So a chain of
    responses goes from its end, and no history loses its beginning. A session that is claimed stays.
    A tenant with more than `tenant_share` of either evicts its own first, so that it does not evict
    everybody's.
    """

    max_sessions: int = 100_000
    max_messages: int = 2_048
    max_chars: int = 1_000_000
    max_responses: int = 200_000
    max_bytes: int = UNBOUNDED
    tenant_share: float = 0.5
    most_sessions_of: Callable[[str], int | None] = _no_other_bound
    """Returns how many sessions a tenant may keep, below its share; None: that."""

    def most_of_a_tenant(self, session_id: str, tenant: str = "") -> int:
        """Returns how many sessions of the same kind one tenant keeps before its own oldest one is evicted.

        `tenant` has a conversation; of a kept response its id says who has it.
        """
        share = max(1, round(self.most_like(session_id) * self.tenant_share))
        own = None if is_response(session_id) else self.most_sessions_of(tenant)
        return share if own is None else min(share, own)

    def most_like(self, session_id: str) -> int:
        """Returns how many sessions of the same kind are kept."""
        return self.max_responses if is_response(session_id) else self.max_sessions

    def check(self, messages: Sequence[Message]) -> None:
        """Raises FAILED_PRECONDITION SESSION_FULL if a session of these messages is too long.

        `max_bytes` is that of one session or response, a quarter of what the store may hold.
        """
        chars = sum(message.num_chars for message in messages)
        if len(messages) > self.max_messages or chars > self.max_chars:
            raise errors.failed_precondition(
                "SESSION_FULL",
                f"a session has at most {self.max_messages} messages and {self.max_chars} characters, "
                f"this one would have {len(messages)} and {chars}",
            )
        if _MOST_CHAR_BYTES * chars + MESSAGE_BYTES * len(messages) > self.max_bytes < (size := bytes_of(messages)):
            what = f"must have at most {self.max_bytes} bytes, a quarter of max_store_bytes, these have {size}"
            raise RyzansteinError(
                f"messages: {what}",
                Code.FAILED_PRECONDITION,
                "SESSION_FULL",
                violations=(errors.FieldViolation("messages", what),),
            )


class StoreUnavailableError(RyzansteinError):
    """The store is locked, full, gone or too slow. It is unknown whether a write was done."""


class UnexpectedStoreError(StoreUnavailableError):
    """The store raised an unexpected error: the store, or what it was to write, may be broken."""


def unexpected(error: Exception) -> UnexpectedStoreError:
    message = f"the session store raised {type(error).__name__}: {error}"[:512]
    return UnexpectedStoreError(message, Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE", retry_after_s=1.0)


def store_unavailable(message: str, session_id: str = "") -> StoreUnavailableError:
    metadata = {"session_id": session_id[:128]} if session_id else {}
    return StoreUnavailableError(message, Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE", metadata, retry_after_s=1.0)


class SessionStore(Protocol):
    """Keeps sessions. No method blocks the event loop.

    Each may raise a `RyzansteinError`, and `StoreUnavailableError` when the store itself fails.
    """

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
        """Creates a session.

        Raises ALREADY_EXISTS when the id is taken, FAILED_PRECONDITION when there are too many
        messages. `fresh`: the id has just been generated, so it cannot be taken. `parent`: a kept
        response that this one continues, and which is used by that; raises NOT_FOUND when there is none. So it
        does for the object of a response that is gone.
        """
        ...

    async def get(self, session_id: str) -> Session:
        """Returns the session with its messages. Raises NOT_FOUND when there is none."""
        ...

    async def owner(self, session_id: str) -> str | None:
        """Returns the tenant of a session, empty if it is nobody's; None when there is no session. Reads nothing else of it."""
        ...

    async def list(self, page_size: int = 0, page_token: str = "", *, tenant: str = "") -> SessionPage:
        """Returns a page of at most 1000 sessions (0: 100) of the tenant, without those that are kept of responses.

        Without a tenant: those of nobody. A token has the id of one of these sessions, and of no other.
        Raises INVALID_ARGUMENT for an invalid size or token.
        """
        ...

    async def delete(self, session_id: str) -> None:
        """Deletes the session. Raises NOT_FOUND when there is none, or it was deleted.

        A kept response that others continue stays for those, as `deleted`, and goes with the last of them.
        """
        ...

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        """Adds a turn at the end, and returns False if it was there already.

        Stores which node answered, and sets the model of a session that had none. A generation's
        turn is added once, however often it is appended, and ends the generation's claim. Raises
        NOT_FOUND when the session was deleted meanwhile.
        """
        ...

    async def claim(self, request: ClaimRequest) -> None:
        """Claims the session for the generation, from now on.

        The session need not exist yet. Raises SessionBusyError while another generation has it,
        or had it when its claim expired. Another owner of the same generation takes the claim over.
        """
        ...

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        """Extends an owner's claims (session id to generation id), or takes them again if free.

        Returns the sessions that another owner or generation has now.
        """
        ...

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        """Ends the claim if it is still this owner's."""
        ...

    async def close(self) -> None: ...


class ServingStore(SessionStore, Protocol):
    """The store that requests use."""

    def unwritten(self, session_id: str) -> bool:
        """Returns whether a change of the session is not in the store yet."""
        ...


RESPONSE_MARK = "-resp_"
OBJECT_MARK = ".object"
"""Ends the id of a kept response's object, which is beside its conversation and goes with it."""
_DIGEST_CHARS = 16
RESPONSE_GLOB = "[0-9a-f]" * _DIGEST_CHARS + RESPONSE_MARK + "*"
"""The ids of `is_response`, as SQLite matches them."""


def is_response(session_id: str) -> bool:
    """Returns whether a session is what the HTTP face keeps of a response: its id begins with a digest of the tenant."""
    digest, mark, _ = session_id.partition(RESPONSE_MARK)
    return bool(mark) and len(digest) == _DIGEST_CHARS and set(digest) <= set("0123456789abcdef")


def digest_of(response: str) -> str:
    """Returns the digest of its tenant that the id of a kept response begins with."""
    return response[:_DIGEST_CHARS]


def owner_of(session_id: str, tenant: str) -> str:
    """Returns the digest of the tenant that has a session or kept response; empty: without keys it is everybody's."""
    digest = digest_of(session_id) if is_response(session_id) else tenant_digest(tenant)
    return "" if digest == tenant_digest("") else digest


def is_object(session_id: str) -> bool:
    """Returns whether a session is the object of a kept response, rather than its conversation."""
    return session_id.endswith(OBJECT_MARK) and is_response(session_id)


def needed_by(session_id: str, parent: str) -> str:
    """Returns the response without which a session is not created: what it continues, or whose object it is."""
    return session_id.removesuffix(OBJECT_MARK) if is_object(session_id) else parent


MAX_STORED_CHARS = MAX_NAME_CHARS + _DIGEST_CHARS + 2


def checked_id(session_id: str) -> str:
    """Returns the name of a session to store: its tenant's digest may be before an id of a client."""
    if not 1 <= len(session_id) <= MAX_STORED_CHARS:
        raise errors.invalid("session_id", f"must have 1 to {MAX_NAME_CHARS} characters", len(session_id))
    return session_id


def checked_page_size(page_size: int) -> int:
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        raise errors.invalid("page_size", f"must be in [0, {MAX_PAGE_SIZE}]", page_size)
    return page_size or DEFAULT_PAGE_SIZE


def page_token(session: Session) -> str:
    """Returns where the next page begins.

    It begins after this session in the descending order of (update_time, session_id).
    """
    return base64.urlsafe_b64encode(f"{session.update_time!r} {session.session_id}".encode()).decode()


def page_of(found: Sequence[Session], size: int) -> SessionPage:
    """Returns the page that these sessions begin, in descending order: one more than its size if there are others behind it."""
    return SessionPage(tuple(found[:size]), page_token(found[size - 1]) if len(found) > size else "")


def read_page_token(token: str) -> tuple[float, str]:
    """Returns the position of a token. The empty token is before the newest session."""
    if not token:
        return float("inf"), ""
    try:
        update_time, _, session_id = base64.urlsafe_b64decode(token.encode()).decode().partition(" ")
        return float(update_time), session_id
    except (ValueError, binascii.Error):
        raise errors.invalid("page_token", "must be the next_page_token of the previous page") from None
