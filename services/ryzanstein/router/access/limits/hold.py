"""What one generation has used, from its admission to its end, and the part of a tenant's limits that it holds."""

from __future__ import annotations

import sys
from typing import Protocol

from ryzanstein.router.access.limits.bounds import UNBOUNDED, LimitBounds
from ryzanstein.router.access.limits.usage import NOTHING, UsageCount, UsageReport

STEP_TOKENS = 256
"""Generated tokens after which a generation that runs is charged again."""
_NEVER = sys.maxsize


class HoldKeeper(Protocol):
    """Whom a hold tells of what it uses. Must not block."""

    def reports(self, hold: Hold) -> None: ...

    def left(self, hold: Hold) -> None:
        """Forgets a hold of which another router reports."""
        ...

    def folded(self, hold: Hold) -> None:
        """Forgets a hold of which what it used is reported together with others."""
        ...

    def is_over(self, hold: Hold) -> bool:
        """Returns whether the answer must end: the month's tokens are used up, and that limit is hard."""
        ...


class Hold:
    """The hold of one generation. The token log counts its tokens; every call says how many there are by now.

    `next_at`: the number of generated tokens at which to call `grown`. It is harmless to call it earlier
    or more often, and to settle twice.
    """

    __slots__ = (
        "_keeper",
        "bounds",
        "confirmed",
        "counted",
        "estimate",
        "generated",
        "generation_id",
        "known",
        "limited",
        "live",
        "local",
        "most",
        "next_at",
        "prompt",
        "refund",
        "requests",
        "sending",
        "tenant",
        "tries",
    )

    def __init__(self, keeper: HoldKeeper, tenant: str, generation_id: str, bounds: LimitBounds, estimate: int = 0) -> None:
        self._keeper = keeper
        self.tenant = tenant
        self.generation_id = generation_id
        self.bounds = bounds
        self.limited = bounds is not UNBOUNDED
        self.estimate = estimate
        self.prompt = self.generated = self.requests = 0
        self.live = True
        self.local = False
        """It was admitted from this router's memory, or is held there."""
        self.confirmed = self.refund = False
        self.most = _NEVER
        """Generated tokens after which the answer ends."""
        self.next_at = STEP_TOKENS if self.limited else _NEVER
        self.counted = NOTHING
        """What metrics and the month count already."""
        self.known = NOTHING
        """What is in the store."""
        self.sending = False
        """A report of it is on its way to the store."""
        self.tries = 0
        """How often it was sent to the store in vain."""

    @property
    def count(self) -> UsageCount:
        return UsageCount(self.requests, self.prompt, self.generated)

    @property
    def report(self) -> UsageReport:
        confirmed = self.confirmed or not self.live
        return UsageReport(
            self.tenant, self.generation_id, self.count, self.known, self.live, confirmed, self.refund, self.local, self.bounds
        )

    def ends_at(self, num_tokens: int) -> None:
        """Has the answer end after so many generated tokens."""
        self.most = num_tokens
        self.next_at = min(self.next_at, num_tokens)

    def accepted(self, prompt_tokens: int) -> None:
        """Counts the prompt, as the node that accepted it did, instead of the estimate."""
        self.prompt, self.requests, self.confirmed = prompt_tokens, 1, True
        if self.limited:
            self._keeper.reports(self)

    def grown(self, num_tokens: int) -> bool:
        """Counts the generated tokens of a generation that goes on. Returns True if its answer must end here."""
        self.generated = max(self.generated, num_tokens)
        self.next_at = min(num_tokens + STEP_TOKENS, self.most) if self.limited else self.most
        if self.limited:
            self._keeper.reports(self)
        return num_tokens >= self.most or self._keeper.is_over(self)

    def settle(self, num_tokens: int) -> None:
        """Counts all that was generated and gives the hold back."""
        if self.live:
            self.generated, self.requests = max(self.generated, num_tokens), 1
            self.live = False
            self._keeper.reports(self)

    def resume(self) -> None:
        """Holds again: a generation that had ended goes on."""
        if not self.live:
            self.live = True
            self.next_at = min(self.generated + STEP_TOKENS if self.limited else _NEVER, self.most)
            self._keeper.reports(self)

    def release(self, *, joined: bool = False) -> None:
        """Gives back what was held for a request that did not begin. `joined`: another generation answers it."""
        if self.live:
            self.live, self.refund = False, joined
            self._keeper.reports(self)

    def leave(self) -> None:
        """Reports no more: another router has the generation, and counts what it uses."""
        if self.live:
            self.live = False
            self._keeper.left(self)
