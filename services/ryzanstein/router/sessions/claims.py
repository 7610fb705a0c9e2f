"""Claims on sessions: one generation at a time speaks in a session, on one router at a time.

A claim names the generation and the running router that has it (its owner), and expires unless it
is renewed. Another owner of the same generation has taken it over, so the claim passes to that
owner. An owner that is known to be gone blocks nothing. An expired claim blocks until its owner has
been asked: it may only have lost the store, and still have a turn to write.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum

from ryzanstein.errors import Code, RyzansteinError

# How long a store remembers an expired claim.
EXPIRED_CLAIM_KEEP_S = 3600.0


class Holding(Enum):
    """What another router says of a session that it claimed."""

    HELD = "held"
    """It still speaks there, or has a turn to write."""
    FREE = "free"
    GONE = "gone"
    """It no longer runs, or its lease has expired and it does not answer."""
    UNKNOWN = "unknown"
    """It may only be slow, or it cannot be asked."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What a router asks of the store: the session for its generation, for `ttl_s`."""

    session_id: str
    generation_id: str
    owner: str
    ttl_s: float
    gone: str = ""
    """An owner that no longer runs: its claim does not count."""
    expired_of: str = ""
    """An owner that was asked and has nothing more to write: its expired claim does not count."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, valid for `ttl_s` from `taken_at`, which is on a clock that never jumps."""

    generation_id: str
    owner: str
    taken_at: float
    ttl_s: float

    def holds(self, now: float) -> bool:
        """Returns whether the claim is valid.

        A claim from the future is from before the machine's last start.
        """
        return self.taken_at <= now < self.taken_at + self.ttl_s

    @classmethod
    def of(cls, request: ClaimRequest, now: float) -> Claim:
        return cls(request.generation_id, request.owner, now, request.ttl_s)

    def forbids(self, request: ClaimRequest, now: float) -> bool:
        """Returns whether this claim keeps another generation from speaking."""
        if self.generation_id == request.generation_id or self.owner == request.gone or self.taken_at > now:
            return False
        return self.holds(now) or self.owner != request.expired_of

    def yields_to(self, other: Claim | None) -> bool:
        """Returns whether another owner or generation held the session when this claim was made."""
        if other is None or not other.holds(self.taken_at):
            return False
        return (other.generation_id, other.owner) != (self.generation_id, self.owner)


class SessionBusyError(RyzansteinError):
    """ABORTED SESSION_BUSY: another generation speaks in the session.

    `generation_id` and `owner` are that one's, and its claim may have `expired`; the client sees
    none of them.
    """

    def __init__(self, session_id: str, generation_id: str, owner: str, *, expired: bool = False) -> None:
        super().__init__(
            f"session {session_id[:128]!r} is busy with another request",
            Code.ABORTED,
            "SESSION_BUSY",
            {"session_id": session_id[:128]},
            retry_after_s=1.0,
        )
        self.generation_id = generation_id
        self.owner = owner
        self.expired = expired


class LocalClaims:
    """The claims of one process."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def claim(self, request: ClaimRequest) -> None:
        """See `SessionStore.claim`."""
        now, held = time.monotonic(), self._claims.get(request.session_id)
        if held is not None and held.forbids(request, now):
            raise SessionBusyError(request.session_id, held.generation_id, held.owner, expired=not held.holds(now))
        self._claims[request.session_id] = Claim.of(request, now)

    def holds(self, session_id: str) -> bool:
        """Returns whether a generation has the session now."""
        held = self._claims.get(session_id)
        return held is not None and held.holds(time.monotonic())

    def renew(self, held: Mapping[str, str], owner: str, ttl_s: float) -> Set[str]:
        """See `SessionStore.renew`."""
        now = time.monotonic()
        mine = {session_id: Claim(generation_id, owner, now, ttl_s) for session_id, generation_id in held.items()}
        lost = {session_id for session_id, claim in mine.items() if claim.yields_to(self._claims.get(session_id))}
        self._claims.update((session_id, claim) for session_id, claim in mine.items() if session_id not in lost)
        return lost

    def release(self, session_id: str, generation_id: str, owner: str) -> None:
        held = self._claims.get(session_id)
        if held is not None and (held.generation_id, held.owner) == (generation_id, owner):
            del self._claims[session_id]

    def turn_stored(self, session_id: str, generation_id: str) -> None:
        """Ends the generation's claim: its turn is stored, by whichever router."""
        held = self._claims.get(session_id)
        if held is not None and held.generation_id == generation_id:
            del self._claims[session_id]
