"""What a session is and what a store of sessions does. Both faces read it; a generation appends its turn at its end.

Knows no gRPC, no HTTP and no node: `node_id` is only remembered.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

from ryzanstein import errors
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation import MAX_NAME_CHARS, Message

MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 100


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation. Times are Unix seconds; `node_id` answered last, empty before the first answer."""

    session_id: str
    model: str
    create_time: float
    update_time: float
    messages: tuple[Message, ...] = ()
    node_id: str = ""


def extended(session: Session, messages: Sequence[Message], model: str, node_id: str) -> Session:
    """The session with one more turn, now."""
    return replace(
        session,
        model=session.model or model,
        messages=(*session.messages, *messages),
        update_time=time.time(),
        node_id=node_id,
    )


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Sessions without their messages, last used first; `next_page_token` is empty on the last page."""

    sessions: tuple[Session, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class SessionBounds:
    """How much a store keeps. Above `max_sessions` the least recently used one is evicted, and that is counted."""

    max_sessions: int = 100_000
    max_messages: int = 2_048
    max_chars: int = 1_000_000

    def check(self, messages: Sequence[Message]) -> None:
        """Raises FAILED_PRECONDITION SESSION_FULL when a session of these messages would be too long."""
        chars = sum(len(message.content) for message in messages)
        if len(messages) > self.max_messages or chars > self.max_chars:
            raise errors.failed_precondition(
                "SESSION_FULL",
                f"a session has at most {self.max_messages} messages and {self.max_chars} characters, "
                f"this one would have {len(messages)} and {chars}",
            )


class StoreUnavailableError(RyzansteinError):
    """The store did not do it: it is locked, full, gone or too slow. Whether the write was done is not known."""


class UnexpectedStoreError(StoreUnavailableError):
    """The store raised what none is expected to: it may be out of order, or what it was asked to write is."""


def unexpected(error: Exception) -> UnexpectedStoreError:
    message = f"the session store raised {type(error).__name__}: {error}"[:512]
    return UnexpectedStoreError(message, Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE", retry_after_s=1.0)


def store_unavailable(message: str, session_id: str = "") -> StoreUnavailableError:
    metadata = {"session_id": session_id[:128]} if session_id else {}
    return StoreUnavailableError(message, Code.UNAVAILABLE, "SESSION_STORE_UNAVAILABLE", metadata, retry_after_s=1.0)


class SessionStore(Protocol):
    """Keeps sessions. No method blocks the event loop; each may raise a `RyzansteinError`, and `StoreUnavailableError` when
    the store itself fails."""

    async def create(self, session_id: str, model: str, messages: Sequence[Message] = (), *, fresh: bool = False) -> Session:
        """ALREADY_EXISTS when the id is taken, FAILED_PRECONDITION when the messages are too many. `fresh`: the id has just
        been made up, so nobody can have taken it."""
        ...

    async def get(self, session_id: str) -> Session:
        """With its messages. NOT_FOUND when there is none."""
        ...

    async def list(self, page_size: int = 0, page_token: str = "") -> SessionPage:
        """A page of at most 1000 sessions (0: 100). INVALID_ARGUMENT for a size or a token that is none."""
        ...

    async def delete(self, session_id: str) -> None:
        """NOT_FOUND when there is none."""
        ...

    async def append(
        self, session_id: str, messages: Sequence[Message], *, model: str, node_id: str, generation_id: str = ""
    ) -> bool:
        """Adds a turn at the end, remembers who answered, and fixes the model of a session that had none.
        A generation's turn is added once, however often it is appended, and its claim ends with it.
        False: it was there already.
        NOT_FOUND when the session was deleted meanwhile."""
        ...

    async def claim(self, session_id: str, generation_id: str, owner: str, ttl_s: float, gone: str = "") -> None:
        """The generation speaks in the session for `ttl_s` from now on; the session need not exist yet.
        SessionBusyError while another generation does, unless its owner is the one that is `gone`. Another owner of the same
        generation takes it over."""
        ...

    async def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        """Extends an owner's claims, session id to generation id, or takes them again where nobody has them.
        Returns the sessions that another owner or generation has now."""
        ...

    async def release(self, session_id: str, generation_id: str, owner: str) -> None:
        """Ends the claim if it is still this owner's."""
        ...

    async def close(self) -> None: ...


def checked_id(session_id: str) -> str:
    if not 1 <= len(session_id) <= MAX_NAME_CHARS:
        raise errors.invalid("session_id", f"has 1 to {MAX_NAME_CHARS} characters", len(session_id))
    return session_id


def checked_page_size(page_size: int) -> int:
    if not 0 <= page_size <= MAX_PAGE_SIZE:
        raise errors.invalid("page_size", f"must be in [0, {MAX_PAGE_SIZE}]", page_size)
    return page_size or DEFAULT_PAGE_SIZE


def page_token(session: Session) -> str:
    """Where the next page begins: after this session in the order (update_time, session_id), falling."""
    return base64.urlsafe_b64encode(f"{session.update_time!r} {session.session_id}".encode()).decode()


def read_page_token(token: str) -> tuple[float, str]:
    """The position that a token stands for. The empty token stands before the newest session."""
    if not token:
        return float("inf"), ""
    try:
        update_time, _, session_id = base64.urlsafe_b64decode(token.encode()).decode().partition(" ")
        return float(update_time), session_id
    except (ValueError, binascii.Error):
        raise errors.invalid("page_token", "must be the next_page_token of the page before") from None
