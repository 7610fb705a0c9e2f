"""What tenants used: the counts of a month, and the reports of generations that they are made of.

A report says all that one generation has used so far, under its id. A store adds what is new in it,
so a report may be repeated, and two routers that had the generation one after the other count it once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ryzanstein import errors
from ryzanstein.router.access.limits.bounds import UNBOUNDED, LimitBounds

OTHER_TENANTS = "(other)"
"""Counts what is used under more names than a month keeps."""
MAX_TENANTS = 10_000
"""Tenants of a month that are counted by name."""
KEEP_YEARS = 1
MIN_KEEP_S = 300.0
"""How long a generation is known at least after its last report, so that it is counted once."""
_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")


def this_month() -> str:
    """Returns the month in UTC, such as 2026-11."""
    return time.strftime("%Y-%m", time.gmtime())


def checked_month(month: str) -> str:
    """Returns a month, this one for an empty text. Raises INVALID_ARGUMENT for what is none."""
    if month and not _MONTH.fullmatch(month):
        raise errors.invalid("month", "must be YYYY-MM", month[:16])
    return month or this_month()


class UsageCount(NamedTuple):
    """Numbers that were used: requests, tokens of prompts, generated tokens."""

    requests: int = 0
    prompt: int = 0
    generated: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    def beyond(self, other: UsageCount) -> UsageCount:
        """Returns what is more here than there; counts never go back."""
        if other is NOTHING:
            return self
        return UsageCount(
            max(0, self.requests - other.requests),
            max(0, self.prompt - other.prompt),
            max(0, self.generated - other.generated),
        )

    def plus(self, other: UsageCount) -> UsageCount:
        if self is NOTHING:
            return other
        return UsageCount(self.requests + other.requests, self.prompt + other.prompt, self.generated + other.generated)


NOTHING = UsageCount()


@dataclass(frozen=True, slots=True)
class UsageReport:
    """All that one generation has used up to now.

    `known` of it is in the store as far as this router knows; it counts only where the store has
    forgotten the generation. `live`: it still runs. `confirmed`: the tokens of its prompt are counted, not
    estimated. `refund`: it did nothing, and its request is given back. `spent`: it was admitted without the
    store, which counts its tokens and does not charge them to a rate. `bounds`: the limits of the tenant.
    """

    tenant: str
    generation_id: str
    count: UsageCount
    known: UsageCount = NOTHING
    live: bool = False
    confirmed: bool = True
    refund: bool = False
    spent: bool = False
    bounds: LimitBounds = UNBOUNDED


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What a tenant used in a month."""

    tenant: str
    month: str
    count: UsageCount


class UsageBook(Protocol):
    """Keeps the counts of months. Every method raises ConnectionError while it cannot be reached."""

    async def write(self, reports: Sequence[UsageReport]) -> dict[str, tuple[str, int]]:
        """Adds what is new in the reports. Returns the month and the tokens in it of each of their tenants."""
        ...

    async def total(self, tenant: str) -> tuple[str, int]:
        """Returns this month and the tokens in it of a tenant."""
        ...

    async def rows(self, month: str, tenant: str | None) -> list[UsageRow]:
        """Returns what a tenant used in a month, or all of them."""
        ...

    async def attend(self) -> int:
        """Says that this router is there, and returns how many are. It is called every few seconds."""
        ...

    async def close(self) -> None: ...
