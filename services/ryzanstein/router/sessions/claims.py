"""Who speaks in a session: one generation at a time, on one router at a time.

A claim names the generation and the router that runs it (its owner) and expires unless it is renewed, so that a router that
died blocks nobody for long. Another owner of the same generation has taken it over: the claim passes to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass

from ryzanstein.errors import Code, RyzansteinError


@dataclass(frozen=True, slots=True)
class Claim:
    """`taken_at` is on a clock that no clock jump moves; valid for `ttl_s` from then."""

    generation_id: str
    owner: str
    taken_at: float
    ttl_s: float

    def holds(self, now: float) -> bool:
        """A claim from the future is one from before the machine was started again."""
        return self.taken_at <= now < self.taken_at + self.ttl_s

    def yields_to(self, other: Claim | None) -> bool:
        """Another owner or another generation holds the session at the moment at which this claim was made."""
        if other is None or not other.holds(self.taken_at):
            return False
        return (other.generation_id, other.owner) != (self.generation_id, self.owner)


def session_busy(session_id: str) -> RyzansteinError:
    return RyzansteinError(
        f"session {session_id[:128]!r} is answering another request",
        Code.ABORTED,
        "SESSION_BUSY",
        {"session_id": session_id[:128]},
        retry_after_s=1.0,
    )


class LocalClaims:
    """The claims of one process."""

    def __init__(self) -> None:
        self._claims: dict[str, Claim] = {}

    def claim(self, session_id: str, generation_id: str, owner: str, ttl_s: float) -> None:
        """ABORTED SESSION_BUSY while another generation holds it."""
        now = time.monotonic()
        held = self._claims.get(session_id)
        if held is not None and held.generation_id != generation_id and held.holds(now):
            raise session_busy(session_id)
        self._claims[session_id] = Claim(generation_id, owner, now, ttl_s)

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

    def told(self, session_id: str, generation_id: str) -> None:
        """The generation's turn is stored, whoever stored it."""
        held = self._claims.get(session_id)
        if held is not None and held.generation_id == generation_id:
            del self._claims[session_id]
